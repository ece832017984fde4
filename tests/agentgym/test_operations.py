"""docs/operations.md: its commands work, and its quotations occur in the sources."""

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from agentgym.config import AlarmsConfig, load_config
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.tracking.points import RULES
from envs.refusals import STATUS
from envs.wire import ErrorKind
from tests.completed import completed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##+ |\Z)", PAGE, re.S | re.M))
ROOMS = ("agentgym", "envs", "services", "tasks", "flows")
GAP = "…"


@pytest.fixture(scope="module")
def sources():
    """(texts of the sources, with a gap for inserted values; names of classes)."""
    texts, classes = set(), {"RuntimeError", "FloatingPointError"}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.add(
                    "".join(p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
                )
            elif isinstance(node, ast.ClassDef):
                classes.add(node.name)
    return texts, classes


def quoted(text):
    """Return the text between single backticks, or double ones, which may contain single ones."""
    found = re.fullmatch(r"`` (.*) ``|`([^`]*)`", text.strip())
    return found[1] or found[2]


def is_said(text, sources):
    """Return True if the sources contain the text; inserted values count as gaps."""
    return any(text in re.sub(r"%(?:\.\d+)?[a-z]", GAP, each) for each in sources[0])


def rows(section, columns):
    found = re.findall(r"^\| " + r" \| ".join(["(.+?)"] * columns) + r" \|$", section, re.MULTILINE)
    return [row for row in found if not row[0].startswith(("---", "class", "kind", "number"))]


ALARMS = [
    row[:2]
    for title, section in SECTIONS.items()
    if title.startswith("Exit code")
    for row in rows(section, 3)
]


@pytest.mark.parametrize(("kind", "text"), ALARMS, ids=[text[:40] for _, text in ALARMS])
def test_an_alarm_is_one_the_sources_raise(kind, text, sources):
    assert quoted(kind) in sources[1]
    assert is_said(quoted(text), sources)


def test_alarms_of_every_part_are_there_and_a_text_nobody_says_is_found(sources):
    assert len(ALARMS) > 30
    assert {"LeaseHeld", "LedgerUnavailable", "RolloutError", "ConfigError", "StoreFull"} <= {
        quoted(kind) for kind, _ in ALARMS
    }
    assert not is_said("… is held by …; please come back later", sources)


def test_what_plan_says_and_services_log_is_quoted_as_it_is(sources):
    said = [quoted(row[0]) for row in rows(SECTIONS["Upgrade"], 2)[1:]]
    assert len(said) == 8
    for text in said:
        assert is_said(text, sources), text
    others = [quoted(found) for found in re.findall(r"`` .*? ``|`[^`]+`", SECTIONS["Services"])]
    others = [text for text in others if GAP in text]
    assert len(others) == 2
    assert all(is_said(text, sources) for text in others)
    assert is_said("… has schema_version …, this agentgym reads up to …", sources)


def test_every_kind_of_the_wire_is_explained_with_its_status():
    section = SECTIONS["What an environment server answers"]
    told = {quoted(row[0]): int(row[1]) for row in rows(section, 4)}
    assert told == {kind.value: STATUS[kind] for kind in ErrorKind}


def test_every_number_to_watch_is_measured(sources):
    (watched,) = re.findall(r"^\| number .*?(?=^\n)", SECTIONS["A nightly run"], re.S | re.M)
    names = re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", "\n".join(r[0] for r in rows(watched, 3)))
    assert len(names) == 9
    for name in names:
        prefix, _, last = name.partition("/")
        # full name, name without its section's prefix, or name without Prometheus' suffix
        known = (name, f"{GAP}/{last}", f"{prefix}/{GAP}", name.removesuffix("_total"))
        assert any(each in sources[0] for each in known), name


def test_the_table_of_training_alarms_is_that_of_the_rules():
    told = {row for row in rows(SECTIONS["Is it learning"], 3) if row[0].startswith("`alarms.")}
    assert told == {
        (
            f"`alarms.{name}`",
            f"{', '.join(f'`{metric}`' for metric in rule.metrics)}: {rule.what},"
            f" {'below' if rule.at_least else 'above'} `alarms.{name}.{rule.limit}`"
            f" ({getattr(getattr(AlarmsConfig(), name), rule.limit):g})",
            rule.advice,
        )
        for name, rule in RULES.items()
    }


def test_a_setting_it_names_exists():
    tree = load_config(ROOT / "params.yaml").model_dump()
    sections = [name for name, value in tree.items() if isinstance(value, dict)]
    named = set(re.findall(rf"`((?:{'|'.join(sections)})\.[a-z_]+)`", PAGE))
    assert len(named) > 10
    # settings of exploring recipes; a file; a tag
    named -= {"algorithm.num_items", "evaluation.png", "evaluation.question"}
    assert [
        path for path in named if path.partition(".")[2] not in tree[path.partition(".")[0]]
    ] == []


def test_a_store_that_was_deleted_comes_back_from_its_backup(copy_run, tmp_path, tiny_params):
    project = tmp_path / "project"
    params = tiny_params(project, deterministic=True, store={"path": ".agentgym/store"})
    copy_run(project / ".agentgym")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def run(title):
        (script,) = re.findall(r"```sh\n(.*?)```", SECTIONS[title], re.DOTALL)
        command = ["bash", "-e", "-c", script]
        ended = completed(*command, cwd=project, env=environment)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    cfg = load_config(params, [f"store.path={project}/.agentgym/store"])
    before = {name: manifest.digest for name, manifest in finished(cfg, open_store(cfg)).items()}
    assert list(before) == list(steps_of(cfg))
    run("Backup")
    assert (project / "backup").stat().st_mode & 0o077 == 0
    shutil.rmtree(project / ".agentgym")
    assert finished(cfg, open_store(cfg)) == {}
    said = run("Restore")
    assert len(re.findall(r"^  skip +\S+ +done, manifest", said, re.MULTILINE)) == len(before)
    store = open_store(cfg)
    after = finished(cfg, store)
    assert {name: manifest.digest for name, manifest in after.items()} == before
    for manifest in after.values():
        store.verify(manifest)
    names = {path.name for path in (project / ".agentgym").iterdir()}
    assert {"store", "mlflow.db", "mlflow-artifacts"} <= names
    assert (project / ".agentgym").stat().st_mode & 0o077 == 0

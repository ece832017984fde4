"""Pages about operating a run: commands work, quoted texts occur in the sources."""

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from agentgym.config import AlarmsConfig, load_config
from agentgym.config.algorithm import FAMILIES
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.tracking.points import RULES
from envs.refusals import STATUS
from envs.wire import ErrorKind
from tests.completed import completed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("agentgym", "envs", "services", "tasks", "flows")
GAP = "…"
NEVER_PRINTED = {
    # caught and handled, or shown as a web page
    *("AlreadyExists", "BadQuery", "ContextFull", "Gone", "IdentitiesUnknown", "IndexDamaged"),
    *("Missing", "NotFound", "Retryable", "Stale", "Stopped"),
}


def page(name):
    return (DOCS / name).read_text()


def sections(name):
    """Return {heading: text below it, up to the next heading} of a page."""
    return dict(re.findall(r"^##+ (.+?)\n(.*?)(?=^##+ |\Z)", page(name), re.S | re.M))


def error_pages():
    names = [f"reference/{path.name}" for path in (DOCS / "reference").glob("errors-*.md")]
    return sorted(set(names) - {"reference/errors-environment-server.md"})


def quotes(section):
    """Return the texts of the block quotes in a section, each one code span."""
    found = re.findall(r"^> .*\n(?:^> .*\n)*", section, re.MULTILINE)
    return [quoted(" ".join(re.sub(r"^> ", "", each, flags=re.M).split())) for each in found]


@pytest.fixture(scope="module")
def sources():
    """(texts of the sources, with a gap for inserted values; names of classes)."""
    texts, classes = set(), {"RuntimeError", "FloatingPointError"}
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
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


def is_in_sources(text, sources):
    """Return True if the sources contain the text; inserted values count as gaps."""
    return any(text in re.sub(r"%(?:\.\d+)?[a-z]", GAP, each) for each in sources[0])


def rows(section, columns):
    found = re.findall(r"^\| " + r" \| ".join(["(.+?)"] * columns) + r" \|$", section, re.MULTILINE)
    return [row for row in found if not row[0].startswith(("---", "class", "kind", "metric"))]


ERRORS = [
    (kind, text)
    for name in error_pages()
    for kind, section in sections(name).items()
    if kind != "Services"
    for text in quotes(section)
]


@pytest.mark.parametrize(("kind", "text"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_an_error_is_one_the_sources_raise(kind, text, sources):
    assert kind in sources[1]
    assert is_in_sources(text, sources)


def test_errors_of_every_part_are_documented_and_an_unknown_text_is_found(sources):
    assert len(ERRORS) > 90
    assert {"LeaseHeld", "LedgerUnavailable", "RolloutError", "ConfigError", "StoreFull"} <= {
        kind for kind, _ in ERRORS
    }
    assert not is_in_sources("… is held by …; please come back later", sources)


def test_every_class_of_errors_has_a_section_and_is_in_the_index():
    classes = set()
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        if path.parts[len(ROOT.parts)] == "envs":
            continue  # a server answers with a kind, see below
        for node in ast.walk(ast.parse(path.read_bytes())):
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            if any(re.search(r"(Error|Exception)$", base) for base in bases):
                classes.add(node.name)
    documented = {kind: name for name in error_pages() for kind in sections(name)}
    assert classes - NEVER_PRINTED <= documented.keys()
    assert not classes & NEVER_PRINTED & documented.keys()
    index = rows(sections("reference/errors.md")["Classes"], 2)
    linked = {}
    for title, links in index:
        kind = re.match(r"`(\w+)`", title)[1]
        linked.setdefault(kind, []).extend(re.findall(r"\(([\w-]+\.md)#(\w+)\)", links))
    expected = {}
    for name in error_pages():
        for kind in sections(name).keys() - {"Services"}:
            expected.setdefault(kind, []).append((Path(name).name, kind.lower()))
    assert {kind: sorted(links) for kind, links in linked.items()} == {
        kind: sorted(links) for kind, links in expected.items()
    }


def test_texts_of_plan_and_services_are_quoted_as_they_are(sources):
    upgrade = sections("how-to/backup-and-upgrade.md")
    texts = [quoted(row[0]) for row in rows(upgrade["What plan prints"], 2)[1:]]
    assert len(texts) == 8
    more = re.findall(r"`(… is [a-z]+)`", upgrade["What plan prints"])
    assert more == ["… is new", "… is gone"]
    for text in (*texts, *more):
        assert is_in_sources(text, sources), text
    services = " ".join(sections("reference/errors-services.md")["Services"].split())
    others = [quoted(found) for found in re.findall(r"`` .*? ``|`[^`]+`", services)]
    others = [text for text in others if GAP in text]
    assert len(others) == 2
    assert all(is_in_sources(text, sources) for text in others)
    assert is_in_sources("… has schema_version …, this agentgym reads up to …", sources)


def test_every_kind_of_the_wire_is_explained_with_its_status():
    text = page("reference/errors-environment-server.md")
    documented = {quoted(row[0]): int(row[1]) for row in rows(text, 4)}
    assert documented == {kind.value: STATUS[kind] for kind in ErrorKind}


def test_every_number_to_watch_is_measured(sources):
    watched = rows(sections("how-to/nightly.md")["What to watch"], 3)
    names = re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", "\n".join(row[0] for row in watched))
    assert len(names) == 9
    for name in names:
        prefix, _, last = name.partition("/")
        # full name, name without its section's prefix, or name without Prometheus' suffix
        known = (name, f"{GAP}/{last}", f"{prefix}/{GAP}", name.removesuffix("_total"))
        assert any(each in sources[0] for each in known), name


def test_the_page_of_training_alarms_is_that_of_the_rules():
    documented = {
        title: re.findall(r"^- (.+?)(?=^- |\Z)", text, re.S | re.M)
        for title, text in sections("reference/alarms.md").items()
        if title.startswith("`alarms.") and title != "`alarms.no_success`"
    }
    assert {
        title: [" ".join(item.split()) for item in items] for title, items in documented.items()
    } == {
        f"`alarms.{name}`": [
            f"Limit: {', '.join(f'`{metric}`' for metric in rule.metrics)}: {rule.what},"
            f" {'below' if rule.at_least else 'above'} `alarms.{name}.{rule.limit}`"
            f" ({getattr(getattr(AlarmsConfig(), name), rule.limit):g}).",
            f"Advice: {rule.advice}.",
        ]
        for name, rule in RULES.items()
    }


def test_a_setting_that_a_page_names_exists():
    tree = load_config(ROOT / "params.yaml").model_dump()
    tree["algorithm"] = {name for family in FAMILIES.values() for name in family.model_fields}
    names = [name for name, value in tree.items() if isinstance(value, dict | set)]
    folders = ("tutorials", "how-to", "concepts", "reference")
    text = "\n".join(path.read_text() for name in folders for path in (DOCS / name).glob("*.md"))
    named = set(re.findall(rf"`((?:{'|'.join(names)})\.[a-z_]+)`", text))
    assert len(named) > 90
    named -= {"evaluation.png", "evaluation.question", "kubernetes.dynamic"}  # no settings
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
        text = sections("how-to/backup-and-upgrade.md")[title]
        (script,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
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
    printed = run("Restore")
    assert len(re.findall(r"^  skip +\S+ +done, manifest", printed, re.MULTILINE)) == len(before)
    store = open_store(cfg)
    after = finished(cfg, store)
    assert {name: manifest.digest for name, manifest in after.items()} == before
    for manifest in after.values():
        store.verify(manifest)
    names = {path.name for path in (project / ".agentgym").iterdir()}
    assert {"store", "mlflow.db", "mlflow-artifacts"} <= names
    assert (project / ".agentgym").stat().st_mode & 0o077 == 0

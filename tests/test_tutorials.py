"""The tutorials, and walks of five users through the commands, followed word by word in a copy of
the repository with smaller settings.
"""

import io
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from agentgym.cli import main as agentgym
from tests.agentgym.families import save_tiny_llama
from tests.benched import benchmark
from tests.projects import copied, finished  # noqa: F401

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
PAGES, WALKS = ROOT / "docs/tutorials", ROOT / "tests/walks"
# a paragraph, then a fenced block
BLOCK = re.compile(
    r"(?P<before>(?:^[^\n`][^\n]*\n)*)\n?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
NEW_FILE = re.compile(r"New file `([^`]+)`:$")
IN_FILE = re.compile(r"\b[Ii]n `([^`]+)`:$")
NUMBER = r"[+\-−]?\d+(?:\.\d+)*"
NAME = r"r[0-9a-f]{12}\b"  # of a run
WORDS = re.compile(rf"(?P<any>…)|(?P<name>\b{NAME})|(?P<number>{NUMBER})|(?P<blank>\s+)")
MODEL = "build/smollm2-135m-instruct"
TYPED = (  # commands whose output is read in a terminal
    *("plan", "plan --set optimizer.lr=0.001", "step report", "step stage-3", "stored", "gc"),
    *("evaluate expert --num-items 5", "compare :warm-start :stage-3", "compare", "history"),
    *("lineage", "config", "config --all", "config --search rate", "doctor", "data validate"),
    *("data keep", "play --model expert", "audit --episodes 1 --updates 1", "promote 1", "--help"),
    *(f"{name} --help" for name in ("evaluate", "audit", "view", "data import", "export")),
)
CLONE = "git clone URL agentgym-flow\ncd agentgym-flow"


@dataclass(frozen=True)
class Block:
    """A block of a tutorial. file: the file that it is the content of, if any. part_of: the file
    that contains it.
    """

    language: str
    text: str
    file: str
    part_of: str


def blocks_of(page):
    """Return the blocks of a tutorial or a walk, in order."""
    blocks = []
    (path,) = (path for folder in (PAGES, WALKS) if (path := folder / f"{page}.md").exists())
    for found in BLOCK.finditer(path.read_text()):
        before = " ".join(found["before"].split())
        files = [match[1] if (match := rule.search(before)) else "" for rule in (NEW_FILE, IN_FILE)]
        blocks.append(Block(found["language"], found["text"], *files))
    return blocks


def pattern(expected):
    """Return a regular expression for the end of an output. Numbers and names of runs stand for
    any; … stands for any text, a line of it alone for any lines.
    """

    def general(match):
        if match["any"]:
            return "\0any\0"
        if match["name"]:
            return "\0name\0"
        return "\0number\0" if match["number"] else "\0blank\0" if match[0] != "\n" else "\n"

    lines = []
    for line in expected.strip("\n").split("\n"):
        if line.strip() == "…":
            lines.append(r"(?:.*\n)*?")
            continue
        text = re.escape(WORDS.sub(general, line.strip()))
        for word, meaning in (
            ("any", ".*"),
            ("name", NAME),
            ("number", NUMBER),
            ("blank", r"[^\S\n]+"),
        ):
            text = text.replace(re.escape(f"\0{word}\0"), meaning)
        lines.append(rf"[^\S\n]*{text}[^\S\n]*\n")
    return re.compile("(?:^|\n)" + "".join(lines) + r"\Z")


class Reader:
    """Follows a tutorial. replaced: commands -> the command or function that runs instead."""

    def __init__(self, project, replaced=()):
        self.project, self.replaced = project, dict(replaced)
        self.outputs = []

    def follow(self, page):
        """Write files, run commands and compare their outputs, in the order of the page."""
        for block in blocks_of(page):
            if block.file:
                path = self.project.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            elif block.part_of:
                assert block.text in (self.project.folder / block.part_of).read_text()
            elif block.language == "sh":
                self.outputs.append(self.run(block.text.strip()))
            else:
                assert block.language == "text", block
                output = self.outputs[-1].rstrip() + "\n"
                assert pattern(block.text).search(output), f"{block.text}\nis not in\n{output}"
        return self

    def run(self, commands):
        if commands in self.replaced:
            commands = self.replaced[commands]
            if callable(commands):
                return commands()
        lines = commands.splitlines()
        if all(re.fullmatch(r"agentgym( [\w./:=+,-]+)+", line) for line in lines):
            words = [line.split() for line in lines]  # need no shell and no new process
        else:
            words = [("bash", "-euo", "pipefail", "-c", commands)]
        ended = [self.project.run(*each, timeout=800) for each in words]
        for each in ended:
            assert each.returncode == 0, f"{commands}\n{each.stdout}{each.stderr}"
        return "".join(each.stdout for each in ended)


@pytest.fixture
def project(finished, copied, tmp_path):  # noqa: F811
    """Return a copy of the finished project, in which `make` finds everything installed."""
    project = copied(finished.folder.parent, tmp_path)
    project.first = finished.first
    return installed(project)


def installed(project):
    """Give the project this environment as its .venv, newer than what `make` compares it with.
    Commands import the project's own sources.
    """
    project.environment |= {"PYTHONPATH": str(project.folder), "LC_ALL": "C.UTF-8"}
    environment = project.folder / ".venv"
    environment.mkdir()
    for each in Path(sys.prefix).iterdir():
        (environment / each.name).symlink_to(each)
    (environment / ".installed").unlink(missing_ok=True)
    (environment / ".installed").touch()
    return project


def without_alarms(output):
    """Return the output without the alarms that the small run's settings raise."""
    return re.sub(r"^alarm .*\n(?:  .*\n)*", "", output, flags=re.MULTILINE)


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_a_tutorial_has_commands_with_outputs_and_ends_with_a_picture_or_a_table(page):
    languages = [block.language for block in blocks_of(page)]
    assert languages.count("sh") > 2
    assert languages.count("text") > 1
    text = (PAGES / f"{page}.md").read_text()
    assert len(languages) == len(re.findall(r"^```\w+$", text, re.MULTILINE))
    end = text[text.rindex("\n## ", 0, text.rindex("\n## Next")) :]
    assert re.search(r"!\[.+\]\(|^\|.+\|$|^```text$", end, re.MULTILINE)


def test_a_text_matches_the_end_of_an_output_up_to_numbers():
    shown = "success   12.5 %\n…\nrun r0123456789ab is done\n"
    output = "first\nsuccess 9 %\n1\n2\nrun rffffffffffff  is done\n"
    assert pattern(shown).search(output)
    assert pattern(shown.replace("\n…", "")).search(output) is None
    assert pattern(shown).search(output + "more\n") is None
    assert pattern("a … c").search("a b c\n")
    assert pattern("gain +1.0").search("gain -2\n")
    assert pattern("gain").search("no gain\n") is None


def test_the_first_run(project):
    recorded = without_alarms(project.first.stdout)
    Reader(project, {CLONE: "true", "make pipeline": lambda: recorded}).follow("first-run")
    assert (project.folder / "pages/index.html").is_file()


@pytest.mark.slow
def test_the_first_comparison(project):
    params = project.folder / "params.yaml"
    tree = yaml.safe_load(params.read_text())
    tree["alarms"] = {"no_success": "off"}  # the small run's warm start solves too little
    params.write_text(yaml.safe_dump(tree))
    Reader(project).follow("first-comparison")
    assert (project.folder / "first/first.png").is_file()


@pytest.mark.slow
def test_the_first_environment(author):
    Reader(author).follow("first-environment")


@pytest.fixture
def author(project):
    """The project, in which pip installs packages into a folder of its own, without a network."""
    # the package's description goes to a folder of its own, its sources stay where they are
    prefix = project.folder / "prefix"
    site = sysconfig.get_path("purelib", vars={"base": str(prefix)})
    path = [site, str(project.folder / "robot/src"), project.environment["PYTHONPATH"]]
    project.is_separate = True  # this process lacks the installed packages
    project.environment |= {
        **dict.fromkeys(("PIP_NO_DEPS", "PIP_NO_INDEX"), "1"),
        "PIP_PREFIX": str(prefix),
        "PYTHONPATH": os.pathsep.join(path),
    }
    return project


@pytest.fixture(scope="module")
def newcomer(finished, copied, tmp_path_factory):  # noqa: F811
    """Return the project after the newcomer's walk."""
    project = installed(copied(finished.folder.parent, tmp_path_factory.mktemp("newcomer")))
    Reader(project, {"make pipeline": lambda: finished.first.stdout}).follow("newcomer")
    return project


def test_the_walk_of_a_newcomer(newcomer):
    assert (newcomer.folder / "comparison/comparison.html").is_file()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("command", TYPED)
def test_what_a_command_prints_in_a_terminal_fits_80_columns(newcomer, command):
    newcomer.environment["COLUMNS"] = "80"
    ended = newcomer.call(agentgym, *command.split(), output=Terminal)
    assert ended.stdout, ended.stderr
    wide = [line for line in ended.stdout.splitlines() if len(line) > 80]
    assert [line for line in wide if len(line.split()) > 1] == []  # a path or address stands alone


@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_of_a_newcomer_are_accessible_and_fit_their_screen(newcomer, browser, width):
    pages = {
        kind: next(newcomer.folder.glob(pattern))
        for kind, pattern in (
            ("report", ".agentgym/reports/*/report.html"),
            ("evaluation", ".agentgym/evaluations/*/report.html"),
            ("comparison", "comparison/comparison.html"),
        )
    }
    page = browser.new_page(viewport={"width": width, "height": 860})
    walk = benchmark("viewer_pages").Walk(page, "")
    for name, path in pages.items():
        page.goto(path.as_uri())
        walk.look(name)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
    assert (walk.errors, walk.violations) == ([], [])


@pytest.mark.slow
def test_the_walk_of_an_environment_author(author):
    Reader(author).follow("environment-author")


@pytest.mark.slow
def test_the_walk_of_a_researcher(project):
    Reader(project).follow("researcher")


@pytest.mark.slow
def test_the_walk_of_a_platform_engineer(project):
    try:
        Reader(project).follow("platform-engineer")
    finally:
        project.run("make", "down")


@pytest.mark.slow
def test_the_walk_of_a_model_owner(small_model):
    Reader(small_model).follow("model-owner")


@pytest.fixture
def small_model(project):
    """Write a tiny Llama to the folder of the tutorial's model, and a profile of its size."""
    save_tiny_llama(project.folder / MODEL)
    profile = project.folder / "profiles/small/smollm2-135m-cpu.yaml"
    tree = yaml.safe_load(profile.read_text())
    tree["rollout"] |= {"items_per_step": 2, "group_size": 2}
    tree["horizon"]["stage_steps"] = [1]
    tree["evaluation"]["num_items"] = 4
    tree["alarms"] = {"no_success": "off"}  # the weights are random
    tree["gate"] = {"min_success": 0.0}
    profile.write_text(yaml.safe_dump(tree))
    return project


@pytest.mark.slow
def test_your_model(small_model):
    Reader(small_model, {"make real-model": "true"}).follow("your-model")
    shutil.rmtree(small_model.folder / "build")

"""Commands in our messages, pages and documents exist in their programs."""

import argparse
import ast
import contextlib
import io
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentgym.cli import _parser

ROOT = Path(__file__).parents[1]
PROGRAM = r"(?:agentgym|make|python -m|dvc|prefect) [^`]+"
PAGES = sorted(
    path
    for pattern in (
        "README.md",
        *(f"docs/{kind}/*.md" for kind in ("tutorials", "how-to", "concepts", "reference")),
        "envs/*/README.md",
        "k8s/*.md",
        "sites/**/*.md",
    )
    for path in ROOT.glob(pattern)
)


def texts(tree):
    """Yield a module's texts for users: all strings but docstrings. A filled-in value becomes 1,
    or the empty text within a word.
    """
    inner, quiet = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(below) for below in ast.walk(node) if below is not node}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            quiet.add(id(node.value))
    for node in ast.walk(tree):
        if id(node) in inner | quiet:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
            )
            yield re.sub(r"\0", "1", re.sub(r"(?<=\w)\0", "", text))


def named():
    """{command: file that names it}"""
    found = {}
    for folder in ("agentgym", "flows", "tasks", "services", "envs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in texts(ast.parse(path.read_text(encoding="utf-8"))):
                for command in re.findall(f"`({PROGRAM})`", text):
                    found.setdefault(" ".join(command.split()), path.relative_to(ROOT))
    for path in sorted((ROOT / "agentgym/pages/templates").glob("*.html")):
        for command in re.findall(f"<code>({PROGRAM[:-5]}[^<]+)</code>", path.read_text()):
            found.setdefault(command, path.relative_to(ROOT))
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        lines = [
            line
            for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in block.replace("\\\n", " ").splitlines()
        ]
        for command in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
            command = " ".join(re.split(r"  #| [|>&]|;|\)", command)[0].split())
            if re.fullmatch(PROGRAM, command):
                found.setdefault(command, path.relative_to(ROOT))
    return found


NAMED = named()


def test_there_are_commands_of_every_program_to_look_at():
    programs = {command.split()[0] for command in NAMED}
    assert programs == {"agentgym", "make", "python", "dvc", "prefect"}
    assert len(NAMED) > 100


@pytest.mark.parametrize("command", NAMED)
def test_a_command_that_is_named_is_one(command):
    program, *words = shlex.split(re.sub(r"\b[A-Z]+\b", "1", command))
    check = {"agentgym": agentgym, "make": make, "python": python, "dvc": dvc, "prefect": prefect}
    check[program](words)


def agentgym(words):
    """Parse a command; one without its required arguments is only a name."""
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            _parser().parse_args(words)
        except SystemExit as ended:
            code = ended.code
    named_only = ("the following arguments are required", "expected one argument")
    assert not code or any(text in said.getvalue() for text in named_only), said.getvalue()


def make(words):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = [word for word in words if "=" not in word]
    assert set(asked) <= set(targets)


def python(words):
    assert words[0] == "-m"
    assert words[1] == "1" or find_spec(words[1]) is not None


def dvc(words):
    from dvc.cli.parser import get_main_parser

    known = next(
        action.choices
        for action in get_main_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert words[0] in known


def prefect(words):
    assert find_spec(f"prefect.cli.{words[0].replace('-', '_')}") is not None

"""`agentgym new ...`: write the package of an environment or a recipe that trains at once."""

from __future__ import annotations

import argparse
import importlib.util
import json
import keyword
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from string import Template

from agentgym.commands.parser import Commands
from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.console.ending import say

STARTERS = Path(__file__).parent / "starters"  # a folder of templates for each kind of package
# tasks of the environment's starter: every third is held out
TRAIN, TEST = "1..167:3,2..167:3", "0..167:3"


def add(commands: Commands) -> None:
    new = commands.group("new", "a package of your own to begin with")
    for kind, run, help_text in (
        ("environment", _environment, "write an environment with its lists, parameters and tests"),
        ("recipe", _recipe, "write a recipe, an advantage and a loss, with its tests"),
    ):
        command = new.add(kind, run, help_text, params=kind == "environment", overrides=False)
        command.add_argument("name", metavar="NAME", help="for example grid-world")
        command.add_argument("--out", type=Path, help="new folder (default: NAME)")


def _environment(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.item_lists import parse_tasks, write_lists
    from agentgym.store.keys import environment_modules

    name, out = arguments.name, arguments.out or Path(arguments.name)
    _check_name("environment", name, "-", lambda: len(environment_modules(name)) > 1)
    params, data = out / "params.yaml", out / "data"
    values = {
        "extends": json.dumps(os.path.relpath(arguments.params, out)),
        "data": shlex.quote(str(data)),
        "data_path": json.dumps(str(data)),
        "params": shlex.quote(str(params)),
        "train": TRAIN,
        "test": TEST,
    }

    def complete(folder: Path) -> None:
        write_lists(folder / "data", name, parse_tasks(TRAIN), parse_tasks(TEST))
        load_config(folder / "params.yaml")

    _write("environment", name, out, values, complete)
    _tell(
        out,
        f"agentgym evaluate expert --params {values['params']}",
        f"python -m flows.pipeline --params {values['params']}",
    )
    return 0


def _recipe(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.algorithms.recipe import known_recipes

    name, out = arguments.name, arguments.out or Path(arguments.name)
    _check_name("recipe", name, "-_", lambda: name in known_recipes())
    _write("recipe", name, out, {}, lambda _: None)
    _tell(out, f"python -m flows.pipeline algorithm.recipe={name}")
    return 0


def _check_name(kind: str, name: str, separators: str, is_taken: Callable[[], bool]) -> None:
    """Raise ConfigError for a name that the package or its module cannot have."""
    if not re.fullmatch(rf"[a-z][a-z0-9]*([{separators}][a-z0-9]+)*", name):
        between = " or ".join(f'"{separator}"' for separator in separators)
        raise ConfigError(
            f"{name!r} is no name of a new {kind}: expected small letters and digits, with"
            f" {between} between words, for example two-words"
        )
    if is_taken():
        raise ConfigError(f"{kind} {name} exists already; choose another name")
    module = name.replace("-", "_")
    installed = importlib.util.find_spec(module)
    if keyword.iskeyword(module) or (installed is not None and installed.origin is not None):
        raise ConfigError(
            f"{name}: the package's module would be {module}, which is a word or a module of"
            " Python or of an installed package; choose another name"
        )


def _write(
    kind: str, name: str, out: Path, values: dict[str, str], complete: Callable[[Path], None]
) -> None:
    """Write the package into a new folder, all of it or nothing.
    values: variables of the templates beside the names. complete: adds the rest to a folder next to
    `out`, and may refuse it. Errors: ConfigError if `out` exists; those of `complete`.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; give a new folder with --out, or choose another name")
    module = name.replace("-", "_")
    values = {**values, "name": name, "module": module, "folder": shlex.quote(str(out))}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
        folder.mkdir()
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written: {error.strerror}; name another --out"
        ) from None
    try:
        for path in sorted((STARTERS / kind).rglob("*.tmpl")):
            relative = str(path.relative_to(STARTERS / kind).with_suffix(""))
            file = folder / relative.replace("module", module)
            file.parent.mkdir(exist_ok=True)
            text = Template(path.read_text(encoding="utf-8")).substitute(values)
            file.write_text(text, encoding="utf-8")
        complete(folder)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tell(out: Path, *commands: str) -> None:
    """Print the files of a new package and the commands that test and use it."""
    folder = shlex.quote(str(out))
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        say(path)
    install = f"pip install --no-build-isolation --editable {folder}"
    say("next")
    for command in (install, f"python -m pytest {folder}", *commands):
        say(f"  {command}")

"""Keys of steps: digests of all that can change a step's result (settings, inputs, source)."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

from agentgym.store.manifest import canonical_json, sha256

PACKAGES = ("agentgym", "envs", "sites")  # our own code; libraries are pinned elsewhere
SHOWN = ("templates", "static")  # web pages in a package: their files count as its source
# Modules that carry state or parameters and never compute a result (parameters are in the keys by
# value): an edit in one of them must not retrain anything.
STATE_ONLY = (
    "agentgym.store",
    "agentgym.tracking",
    "agentgym.deploy",
    "agentgym.cli",
    "agentgym.commands",
    "agentgym.config",
    "agentgym.steps.context",
    "agentgym.private",
    "agentgym.defaults",
    "agentgym.console.progress",
)


def step_key(step: str, *, config: dict[str, Any], inputs: dict[str, str], source: str) -> str:
    """Return the identity of a step's result, 64 hex digits.

    config: settings that change the result; inputs: name -> digest of data and parent manifests;
    source: `source_digest` of the modules that compute it.
    """
    return sha256(
        canonical_json({"step": step, "config": config, "inputs": inputs, "source": source})
    )


def object_name(run_key: str, step: str, attempt: int) -> str:
    """Return a name within the limits of Kubernetes and KubeRay: `r<12 hex>-s2-a1` for stage-2.

    step: its words become their first letters, its numbers stay; evaluate-warm-start is `ews`.
    Errors: ValueError for a key that is not hex.
    """
    if not re.fullmatch(r"[0-9a-f]{12,}", run_key):
        raise ValueError(
            f"run key {run_key!r} must be at least 12 lower-case hex digits; pass the key itself,"
            " not a name"
        )
    short = "".join(word if word.isdigit() else word[0] for word in step.split("-"))
    return f"r{run_key[:12]}-{short}-a{attempt}"


def source_digest(modules: Sequence[str]) -> str:
    """Return the digest of these modules and all they import from our own packages, transitively.

    A package includes all modules below it, and its templates of web pages.
    Modules in STATE_ONLY are left out unless `modules` contains them.
    A third-party package in `modules` counts whole, with its data files and its version, because it
    may import by name.
    The result is cached for this process, also if files change.
    Errors: ValueError for a module that does not exist.
    """
    return _digest_once(tuple(sorted(set(modules))))


@functools.cache
def _digest_once(modules: tuple[str, ...]) -> str:
    others = {module.split(".")[0] for module in modules} - set(PACKAGES)
    folders = package_folders(others)
    digest = digest_files(source_files(modules, folders))
    if not others:
        return digest
    whole = [
        [name, _version(name), digest_files(_all_files(folders[name]))] for name in sorted(others)
    ]
    return sha256(canonical_json([digest, whole]))


def environment_modules(name: str) -> tuple[str, ...]:
    """Return the modules that compute an environment: envs.server, and envs.<name> or, without it,
    the modules that installed packages register for this name.
    """
    module = f"envs.{name}"
    if importlib.util.find_spec(module) is not None:
        return ("envs.server", module)
    installed = entry_points(group="agentgym.envs", name=name)
    return ("envs.server", *(entry.module for entry in installed))


def _version(package: str) -> str:
    """Return name and version of the distribution whose entry points name this package; else ""."""
    for distribution in distributions():
        if any(entry.module.split(".")[0] == package for entry in distribution.entry_points):
            return f"{distribution.name} {distribution.version}"
    return ""


def _all_files(folder: Path) -> dict[str, Path]:
    if folder.is_file():
        return {folder.name: folder}
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def digest_files(files: Mapping[str, Path]) -> str:
    """Return one sha256 over the keys and the contents of these files; their paths do not count."""
    return sha256(canonical_json({name: sha256(path.read_bytes()) for name, path in files.items()}))


def package_folders(others: Collection[str] = ()) -> dict[str, Path]:
    """Return name -> folder (or file of a single-file module) of our packages and `others`.
    Nothing is imported. A package that is not installed is left out.
    """
    folders = {}
    for name in {*PACKAGES, *others}:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            folders[name] = Path(next(iter(spec.submodule_search_locations)))
        elif spec is not None and spec.origin:
            folders[name] = Path(spec.origin)
    return folders


def source_files(modules: Sequence[str], folders: Mapping[str, Path]) -> dict[str, Path]:
    """Return module name -> file, for `modules` and all they import from the packages in `folders`.
    A package includes all modules below it; its web pages have names such as
    `package/templates/page.html`. STATE_ONLY modules are left out unless `modules` contains them.
    Sorted by name. Errors: ValueError for a module that does not exist.
    """
    files: dict[str, Path] = {}
    waiting: list[str] = []
    for module in modules:
        path = _find(module, folders)
        if path is None:
            raise ValueError(
                f"module {module!r} is not in {' or '.join(sorted(folders))}; check its spelling"
            )
        below = _below(module, path)
        waiting += [
            module,
            *(name for name in below if _is_state_only(module) or not _is_state_only(name)),
        ]
    while waiting:
        module = waiting.pop()
        path = _find(module, folders)
        if module in files or path is None:
            continue
        files[module] = path
        if path.name == "__init__.py":
            pages = [path.parent / folder for folder in SHOWN]
            shown = [file for folder in pages for file in _all_files(folder).values()]
            files |= {f"{module}/{file.relative_to(path.parent)}": file for file in shown}
        imports = _imports(module, path, path.read_bytes())
        waiting += [name for name in imports if not _is_state_only(name)]
    return dict(sorted(files.items()))


def _find(module: str, folders: Mapping[str, Path]) -> Path | None:
    top, *rest = module.split(".")
    if top not in folders or not all(part.isidentifier() for part in rest):
        return None
    if not rest and folders[top].is_file():
        return folders[top]
    base = folders[top].joinpath(*rest)
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def _below(module: str, path: Path) -> Iterator[str]:
    if path.name == "__init__.py":
        for child in path.parent.rglob("*.py"):
            parts = child.relative_to(path.parent).with_suffix("").parts
            yield ".".join([module, *(part for part in parts if part != "__init__")])


@functools.cache  # one file belongs to the sources of many steps
def _imports(module: str, path: Path, source: bytes) -> tuple[str, ...]:
    """Return the names that `source`, the code of `module`, imports; some may be no modules.
    Packages above a name are included, and those above `module`, because importing runs them.
    """
    names = list(_chain(module.rpartition(".")[0]))
    for node in _statements(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names += _chain(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, path)
            names += _chain(base)
            names += [f"{base}.{alias.name}" for alias in node.names]
    return tuple(names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below `node`. Skip expressions, which import nothing, to save time."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _chain(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, node.module] if node.module else package)


def _is_state_only(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in STATE_ONLY)

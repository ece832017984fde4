"""Read params.yaml: files that extend each other, layers, overrides and error texts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from agentgym.config.algorithm import DEFAULT_RECIPE, algorithm_config, carried_over
from agentgym.config.params import RunConfig, refused_elsewhere
from agentgym.config.pretrained import is_pretrained, with_defaults, without_sizes
from agentgym.config.section import ConfigError, Section, is_operational, unknown_key
from agentgym.trust import untrusted_address

MAX_VALUES = 100_000  # of one parameter file
MAX_DEPTH = 100  # levels of one parameter file
# libyaml's loader, if PyYAML was built with it, is eight times as fast; every command uses it
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NO_JSON = tuple(
    f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "binary", "set", "omap", "pairs")
)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """YAML with JSON's data model: a date is text, and a key occurs once in a mapping."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (as PyYAML has it)
        first: [resolver for resolver in resolvers if resolver[0] not in _NO_JSON]
        for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make for tag, make in _SafeLoader.yaml_constructors.items() if tag not in _NO_JSON
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Construct a mapping. Errors: ConstructorError if a key occurs twice."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = (key.tag, str(key.value))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands here twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def load_config(
    path: Path | str = "params.yaml",
    overrides: Sequence[str] = (),
    *,
    layers: Sequence[Mapping[str, Any]] = (),
) -> RunConfig:
    """Read a params file, apply `key.path=value` overrides, validate.

    A file may begin with `extends: OTHER` (a path relative to itself): its values then replace the
    other file's.
    layers: mappings shaped like the file; each replaces values of the earlier ones, and the
    overrides replace theirs. With a pretrained model, missing settings get its defaults.
    Errors: ConfigError with one line, also for a missing file, broken YAML, an untrusted address of
    Ray or MLflow, or settings that steps on other machines cannot use.
    """
    tree = read_tree(Path(path))
    for layer in layers:
        tree = merge(tree, layer)
    # recipe and kind of model first: they discard the file's settings for other ones, but must not
    # discard those of other overrides
    first = ("algorithm.recipe=", "model.source=")
    for override in sorted(overrides, key=lambda text: not text.startswith(first)):
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"override {override!r} must look like key.path=value, for example"
                " optimizer.lr=3e-4"
            )
        if f"{key}=" in first:
            section, name = key.split(".")
            tree = merge(tree, {section: {name: _parse(text)}})
        _assign(tree, key.split("."), _parse(text), override)
    _check_size(tree, path)
    if is_pretrained(tree):
        tree = with_defaults(tree)
    try:
        cfg = RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(first_line(error)) from None
    ray_address = "" if cfg.compute in ("inline", "kuberay") else cfg.ray.address
    refused = untrusted_address(ray_address, cfg.tracking.uri, os.environ)
    refused = refused or refused_elsewhere(cfg)
    if refused is not None:
        raise ConfigError(refused)
    return cfg


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a configuration, with its default and description."""

    section: str  # "" at the top, `warm_start.optimizer` inside another
    name: str
    value: Any
    default: Any
    changes_results: bool
    description: str
    choices: tuple[Any, ...]  # all values it may have, if they are a fixed set
    example: Any  # a value you could give it; the default unless that is empty

    @property
    def path(self) -> str:
        """Dotted path, as in an override."""
        return ".".join(filter(None, (self.section, self.name)))


def settings(cfg: RunConfig) -> Iterator[Setting]:
    """Yield every setting, section by section. The defaults are those of the configured recipe."""
    algorithm = algorithm_config(cfg.algorithm.recipe).model_copy(update={"recipe": DEFAULT_RECIPE})
    yield from _settings(cfg, RunConfig().model_copy(update={"algorithm": algorithm}), ())


def _settings(values: Section, defaults: Section, section: tuple[str, ...]) -> Iterator[Setting]:
    plain, usual = (tree.model_dump(mode="json") for tree in (values, defaults))
    inner = []
    for name, info in type(values).model_fields.items():
        value = getattr(values, name)
        if isinstance(value, Section):
            inner.append((value, getattr(defaults, name), (*section, name)))
            continue
        yield Setting(
            ".".join(section),
            name,
            plain[name],
            usual[name],
            not is_operational(info),
            info.description or "",
            choices_of(info.annotation),
            info.examples[0] if info.examples else usual[name],
        )
    for arguments in inner:
        yield from _settings(*arguments)


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, also of an optional one; empty for any other type."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) not in (Union, UnionType):
        return ()
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return choices_of(parts[0]) if len(parts) == 1 else ()


def config_digest(semantic: dict[str, Any]) -> str:
    """sha256 of the fields that change results, as canonical JSON; 64 hex digits."""
    return hashlib.sha256(
        json.dumps(semantic, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def read_tree(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the mapping in a YAML file, merged over the file it extends, if any.
    extended_by: files that extend this one. Errors: ConfigError with one line, also for a loop.
    """
    if path.resolve() in extended_by:
        raise ConfigError(
            f"{path} extends itself, by way of {', '.join(str(other) for other in extended_by)};"
            " remove one `extends`"
        )
    # errors of YAML quote the file: `extends` or a flow's parameter must not reveal a key file
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"parameter file {path} must end in .yaml or .yml")
    if not path.is_file():
        raise ConfigError(
            f"parameter file {path} does not exist; run from the project's root or name one with"
            " --params FILE"
        )
    try:
        tree = _read_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    _check_size(tree, path)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    base = tree.pop("extends", None)
    if base is None:
        return tree
    return merge(read_tree(path.parent / str(base), (*extended_by, path.resolve())), tree)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506  (made of a safe one)


def _check_size(tree: Any, path: Path | str) -> None:
    """Raise ConfigError for a tree that is too large or nested too deep to be processed.
    Aliases (`*name`) can unfold to more values than fit in memory, or to a loop.
    """
    waiting, num_values = [(tree, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        num_values += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path} is nested more than {MAX_DEPTH} levels deep; write it flat")
        if num_values > MAX_VALUES:
            raise ConfigError(
                f"{path} unfolds to more than {MAX_VALUES} values; write fewer, or without aliases"
            )
        if isinstance(value, dict):
            waiting.extend((child, depth + 1) for child in value.values())
        elif isinstance(value, list):
            waiting.extend((child, depth + 1) for child in value)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with the values of `over`, section by section; lists and each
    `options` are replaced whole.

    Settings of `base` that were chosen for another recipe or kind of model are left out. Values
    that need no merging are shared with the result, not copied.
    """
    turns_pretrained = is_pretrained(over) and not is_pretrained(base)
    result = without_sizes(base) if turns_pretrained else dict(base)
    for key, value in over.items():
        # env.options is replaced whole: options of two environments must not mix
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and key != "options"
        if both and key == "algorithm" and "recipe" in value:
            result[key] = carried_over(result[key], str(value["recipe"]))
        result[key] = merge(result[key], value) if both else value
    return result


def _parse(text: str) -> Any:
    """Parse YAML, also `1e-3`, which YAML 1.1 reads as text; invalid YAML is returned as text."""
    try:
        value = _read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str) and value == text:  # quoted text stays text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(tree: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section"
            )
        tree = node
    tree[keys[-1]] = value


# setting of an earlier version -> its name today; similar names are found without an entry
RENAMED = {"system_prompt": "instructions", "offline": "algorithm"}


def first_line(error: ValidationError, root: type[BaseModel] = RunConfig) -> str:
    """Return a validation's first problem as one line; an unknown key with the nearest known one.
    root: the model that was validated.
    """
    problems = error.errors(include_url=False)
    problem = problems[0]
    where = [str(part) for part in problem["loc"]]
    path = ".".join(where)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    if where and where[-1].startswith("literal["):  # one of several kinds: the last part names it
        same = [other["msg"] for other in problems if other["loc"][:-1] == problem["loc"][:-1]]
        path = ".".join(where[:-1])
        others = [text.removeprefix("Input should be ") for text in same[1:]]
        message = " or ".join([message, *others])
    if problem["type"] == "extra_forbidden":
        known, name = _known_keys(where[:-1], root), where[-1]
        return unknown_key(where[:-1], name, known, sought=RENAMED.get(name, ""))
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    came = json.dumps(problem["input"], default=str)
    return f"{path}: {message}, got {came[:80]} ({type(problem['input']).__name__})"


def _known_keys(path: list[str], root: type[BaseModel]) -> list[str]:
    model = root
    for key in path:
        if key not in model.model_fields:  # of a list or a mapping: its entries have one model
            continue
        annotation = model.model_fields[key].annotation
        inner = [
            kind
            for kind in (annotation, *get_args(annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not inner:
            return []
        model = inner[0]
    return sorted(model.model_fields)

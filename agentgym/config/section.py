"""What every section of the configuration is made of."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch, MLflow and servers take 64 bits with a sign


class ConfigError(ValueError):
    """One line that says what was expected, what came and what to do.
    Exit code 2; nothing was started.
    """


def unknown_key(place: Sequence[str], name: str, known: Collection[str], sought: str = "") -> str:
    """What to say of a key that is none. place: the sections it stands in; sought: what it may be
    called today.
    """
    near = difflib.get_close_matches(sought or name, known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {'.'.join([*place, near[0]])}?"
        if near
        else f"known: {', '.join(sorted(known))}"
    )
    return f"unknown key {'.'.join([*place, name])}; {hint}"


def setting(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes results: it is part of the keys."""
    return Field(default=default, description=description, **constraints)


def operational(default: Any, description: str, **constraints: Any) -> Any:
    """A field that changes where or how fast work is done, never its result: it stays out of
    every key.
    """
    return Field(
        default=default,
        description=description,
        json_schema_extra={"operational": True},
        **constraints,
    )


def is_operational(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and bool(
        info.json_schema_extra.get("operational")
    )


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """The fields that change a result, as plain JSON types."""
        result: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if is_operational(info):
                continue
            value = getattr(self, name)
            if isinstance(value, tuple) and value and isinstance(value[0], Section):
                result[name] = [each.semantic() for each in value]
            else:
                result[name] = (
                    value.semantic()
                    if isinstance(value, Section)
                    else json.loads(json.dumps(value))
                )
        return result

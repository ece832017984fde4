"""Building blocks of every section of the configuration."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch, MLflow and servers take signed 64 bits


class ConfigError(ValueError):
    """A wrong setting; one line states what was expected, what came and what to do.
    Commands exit with code 2.
    """


def unknown_key(
    sections: Sequence[str], name: str, known: Collection[str], sought: str = ""
) -> str:
    """Return the error text for an unknown key, with the valid name that is most like it, if any.
    sections: path to the key. known: valid names. sought: new name of a renamed key, if known.
    """
    near = difflib.get_close_matches(sought or name, known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {'.'.join([*sections, near[0]])}?"
        if near
        else f"known: {', '.join(sorted(known))}"
    )
    return f"unknown key {'.'.join([*sections, name])}; {hint}"


def first_of(names: Sequence[str], num: int = 5, separator: str = ", ") -> str:
    """Join the first `num` names, and state how many more there are."""
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return f"{separator.join(names[:num])}{more}"


def setting(default: Any, description: str, **constraints: Any) -> Any:
    """Return a pydantic field that changes results and therefore is part of the store's keys."""
    return Field(default=default, description=description, **constraints)


def operational(default: Any, description: str, **constraints: Any) -> Any:
    """Return a pydantic field that changes where or how fast work is done, never its result.
    It is part of no key in the store.
    """
    return Field(
        default=default,
        description=description,
        json_schema_extra={"operational": True},
        **constraints,
    )


def is_operational(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("operational"))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """Yield the error text of each rule between settings that they break; most have none."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        if problem := next(self.problems(), None):
            raise ValueError(problem)
        return self

    def semantic(self) -> dict[str, Any]:
        """Return the fields that change a result, as plain JSON types."""
        result: dict[str, Any] = {}
        for name, info in type(self).model_fields.items():
            if is_operational(info):
                continue
            value = getattr(self, name)
            if isinstance(value, tuple) and value and isinstance(value[0], Section):
                result[name] = [section.semantic() for section in value]
            elif isinstance(value, Section):
                result[name] = value.semantic()
            else:
                result[name] = json.loads(json.dumps(value))
        return result

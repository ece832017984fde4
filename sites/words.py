"""Load the word lists that the content is generated from: words.json next to a module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(module: str) -> Any:
    """Load words.json from the folder of a module; `module` is the path of its file.

    Lists become tuples, so that records can share them.
    """
    return _frozen(json.loads(Path(module).with_name("words.json").read_text(encoding="utf-8")))


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(entry) for entry in value)
    return (
        {key: _frozen(entry) for key, entry in value.items()} if isinstance(value, dict) else value
    )

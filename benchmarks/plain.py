"""Whether the text is plain: `python benchmarks/plain.py [ROOT [FOLDER...]]` prints its counts.

Counted are docstrings that open as half a sentence, names that say nothing, and words of a dialect.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentgym", "envs", "sites", "services", "tasks", "flows")
# pronouns and genitives: what follows hangs on the signature or on a noun that is not named
OPENERS = re.compile(
    r"(What|Of|As|How|Where|Whether|Those|That|Which|Who|Whoever|Whom|Whose|When|Whatever)\b"
)
NAMES = ("each", "found", "told", "own", "held", "place", "most", "asked", "said", "beside")
DIALECT = re.compile(
    r"\b(told|tells|said|says|whoever|nobody|somebody|beside|where it|where they|goes on)\b", re.I
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Text:
    num_docstrings: int
    openers_frac: float  # of these, those that open with a word of OPENERS
    num_names: int  # bindings: parameters, targets of assignments, loops and comprehensions
    vague_per_1000: float  # of these, those in NAMES
    dialect_per_million: float  # matches per million characters of docstrings, comments, strings
    most_common: dict[str, int]  # of openers, names and dialect together


def text_of(sources: Iterable[str]) -> Text:
    """Count Python sources."""
    docstrings, openers, num_names, characters = 0, Counter[str](), 0, 0
    vague, dialect = Counter[str](), Counter[str]()
    for source in sources:
        tree = ast.parse(source)
        for _, docstring in docstrings_of(tree):
            docstrings += 1
            if opener := OPENERS.match(docstring):
                openers[opener.group()] += 1
        for name in bound_names(tree):
            num_names += 1
            if name in NAMES:
                vague[name] += 1
        for text in (*strings_of(tree), *comments_of(source)):
            characters += len(text)
            dialect.update(word.lower() for word in DIALECT.findall(text))
    return Text(
        docstrings,
        round(openers.total() / max(docstrings, 1), 4),
        num_names,
        round(1000 * vague.total() / max(num_names, 1), 2),
        round(1e6 * dialect.total() / max(characters, 1), 1),
        dict((openers + vague + dialect).most_common(20)),
    )


def docstrings_of(tree: ast.Module) -> Iterator[tuple[Documented, str]]:
    """Yield (node, docstring) of the module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            yield node, docstring


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Yield the name of every parameter and of every target."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def strings_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def comments_of(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def sources_in(*folders: Path) -> list[str]:
    return [
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if path.stat().st_size
    ]


def main(arguments: list[str]) -> None:
    root, folders = Path(arguments[0] if arguments else ROOT), arguments[1:] or PACKAGES
    counts = text_of(sources_in(*(root / folder for folder in folders)))
    sys.stdout.write(json.dumps(asdict(counts), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

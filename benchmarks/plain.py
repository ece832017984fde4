"""Counts of unplain text: docstrings that open as half a sentence, vague names, words of a dialect.

`python benchmarks/plain.py` prints them; `python benchmarks/plain.py BEFORE` also counts the commit
BEFORE and three other projects, and writes docs/results/plain.json. `--draw SEED` lists a hundred
docstrings for a reader to judge: docs/results/docstrings.md.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import random
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import PACKAGES, RESULTS, ROOT, checkout, commit_of, parser_of, write

SIMULATORS = ("babyai", "sciworld", "searchqa", "textcraft", "webarena")  # prose of their own
ANCHORS = ("starlette", "httpx", "prefect")  # other projects, as installed
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


def text_of(sources: Iterable[str], simulators: Iterable[str] = ()) -> Text:
    """Count Python sources. Of simulators, only docstrings and comments count as prose."""
    docstrings, openers, num_names, characters = 0, Counter[str](), 0, 0
    vague, dialect = Counter[str](), Counter[str]()
    kinds = [(source, strings_of) for source in sources]
    for source, prose_of in [*kinds, *((source, documented) for source in simulators)]:
        tree = ast.parse(source)
        for _, docstring in docstrings_of(tree):
            docstrings += 1
            if opener := OPENERS.match(docstring):
                openers[opener.group()] += 1
        for name in bound_names(tree):
            num_names += 1
            if name in NAMES:
                vague[name] += 1
        for text in (*prose_of(tree), *comments_of(source)):
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
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            yield node, docstring


def bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def strings_of(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that are prose: those with a blank, because others are keys or paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def documented(tree: ast.Module) -> list[str]:
    return [docstring for _, docstring in docstrings_of(tree)]


def comments_of(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def sources_in(root: Path, *folders: str) -> list[str]:
    return [
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        if path.stat().st_size
    ]


def count(root: Path, *folders: str) -> Text:
    """Count the Python files of the packages, or of other folders, below `root`."""
    names = folders or PACKAGES
    simulators = set() if folders else {*sources_in(root, *(f"envs/{name}" for name in SIMULATORS))}
    sources = [source for source in sources_in(root, *names) if source not in simulators]
    return text_of(sources, simulators)


def dialect_of_documents() -> float:
    """Return the matches of DIALECT per million characters of the documents, without CHANGELOG."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    ).stdout.split()
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in listed if path != "CHANGELOG.md"]
    return 1e6 * sum(len(DIALECT.findall(text)) for text in texts) / sum(map(len, texts))


def count_package(name: str) -> Text:
    (installed,) = importlib.util.find_spec(name).submodule_search_locations
    return count(Path(installed).parent, name)


def draw(seed: str, count: int = 100) -> list[str]:
    """Draw functions and classes with docstrings, as "path:line name"."""
    places = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for node, _ in docstrings_of(ast.parse(path.read_text(encoding="utf-8")))
        if not isinstance(node, ast.Module)
    ]
    return sorted(random.Random(seed).sample(places, count))  # noqa: S311  # not a secret


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("before", nargs="?", metavar="BEFORE", help="a commit")
    parser.add_argument("--draw", metavar="SEED")
    chosen = parser.parse_args()
    if chosen.draw:
        print("\n".join(draw(chosen.draw)))
        return
    documents = {"documents_dialect_per_million": round(dialect_of_documents(), 1)}
    counts = {"now": asdict(count(ROOT)) | documents}
    if chosen.before:
        with checkout(commit_of(chosen.before)) as tree:
            counts["before"] = {"commit": chosen.before, **asdict(count(tree))}
        counts |= {name: asdict(count_package(name)) for name in ANCHORS}
        write(RESULTS / "plain.json", counts)
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()

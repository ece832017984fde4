"""Print facts of former documents that no document has now: `python tools/moved_facts.py COMMIT`.

A fact is a number, an inline code span, or the target of a link in a page that existed at COMMIT
and is gone or shorter now. The search covers all documents of the working tree, blocks of code
included. Results, which scripts write, are not searched for numbers.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_GUIDES = ("operations", "adding", "reproduce", "viewer", "architecture")
FORMER = ("README.md", *(f"docs/{name}.md" for name in _GUIDES))
PAGES = ("*.md", "docs/*/*.md", "envs/*/README.md", "examples/*/README.md", "*/README.md")
FORMER_NAMES = {Path(page).name for page in FORMER}
# a place in a source file: the guides name it by the beginning of its line now
PLACE = re.compile(r"(before|after|in place of) the line `")
# facts that pages have in another form
OTHERWISE = {
    "docs/images/view-episodes-phone-light.png",  # the viewer's page has the dark one
    "-10",  # ±10
    "`promote --force`",  # agentgym promote VERSION --force
    "` | or use `",  # markup between two cells
}
LEFT_OUT = ("docs/results", "CHANGELOG.md")
NUMBER = re.compile(r"(?<![\w.-])[+-]?\d[\d.,]*\d|(?<![\w.-])[+-]?\d")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def main(commit: str) -> int:
    text = "\n".join(path.read_text(encoding="utf-8") for path in documents())
    numbers = set(NUMBER.findall(text))
    code = text.replace("\\\n", " ").replace("\n> ", " ")
    code_nospace = re.sub(r"[\s`]", "", code)  # a long span may be wrapped
    targets = {Path(target.partition("#")[0]).name for target in LINK.findall(text)}
    targets |= {Path(target).name for target in re.findall(r"^\[[^]]+\]: (\S+)$", text, re.M)}
    missing = 0
    for page in FORMER:
        former = shown(commit, page)
        for line in former.splitlines():
            if PLACE.search(line):
                continue
            gone = [n for n in NUMBER.findall(CODE.sub("", line)) if n not in numbers]
            for span in CODE.findall(line):
                if re.sub(r"[\s`]", "", span) not in code_nospace:
                    gone.append(f"`{span}`")
            for target in LINK.findall(line):
                name = Path(target.partition("#")[0]).name
                if not target.startswith("#") and name not in targets | FORMER_NAMES:
                    gone.append(target)
            gone = [fact for fact in gone if fact not in OTHERWISE]
            if gone:
                missing += len(gone)
                sys.stdout.write(f"{page}: {'  '.join(gone)}\n    {line.strip()[:160]}\n")
    sys.stdout.write(f"{missing} facts have no place\n")
    return missing > 0


def documents() -> Iterator[Path]:
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith((".", *LEFT_OUT)) and name not in FORMER[1:]:
            yield path


def shown(commit: str, page: str) -> str:
    command = ["git", "show", f"{commit}:{page}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Which files are the site's: the repository's own documents at their own paths, so that a link
means the same here and there, what they link to, and a page of reference for each room of agentgym.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/concepts/*.md",
    "docs/results/*.md",
    "*/README.md",
    "*/*/README.md",
)
LEFT_OUT = ("tests", "node_modules")  # and whatever begins with a dot
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def on_config(config: Any) -> Any:
    """Results, environments and the reference follow what mkdocs.yml names."""
    named = {name for entry in config.nav for name in entry.values()}
    rest = [path for path in pages() if path not in named]
    results = [path for path in rest if path.startswith("docs/results/")]
    others = [path for path in rest if path not in results] + [_index(path) for path in folders()]
    reference = [{_title(page): page} for page in rooms()]
    config.nav = [*config.nav, {"Results": results}, {"More": others}, {"Reference": reference}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Instead of what lies in `docs_dir`, the repository's files at their paths in it."""
    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
    for path in [*pages(), "docs/site.css", *linked()]:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path in folders():
        listed = sorted(each.name for each in (ROOT / path).iterdir() if each.is_file())
        text = "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in listed)])
        files.append(File.generated(config, _index(path), content=text))
        for name in listed:
            if files.get_file_from_path(f"{path}/{name}") is None:
                source = str(ROOT / path / name)
                files.append(File.generated(config, f"{path}/{name}", abs_src_path=source))
    for path, modules in rooms().items():
        title = _title(path)
        # the room's own words come first, under the page's title
        first = (
            f"::: {title}\n    options: {{heading_level: 1}}" if title in modules else f"# {title}"
        )
        parts = [first, *(f"::: {module}" for module in modules if module != title)]
        files.append(File.generated(config, path, content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a folder leads to its list of files."""
    here = Path(page.file.src_uri).parent

    def to_index(found: re.Match[str]) -> str:
        target = (ROOT / here / found[1]).resolve()
        is_folder = target.is_dir() and str(target.relative_to(ROOT)) in folders()
        return (
            found[0].replace(found[1], f"{found[1].rstrip('/')}/index.md")
            if is_folder
            else found[0]
        )

    return LINK.sub(to_index, markdown)


def pages() -> list[str]:
    """Paths of the documents, in order."""
    found = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if not name.startswith((".", *LEFT_OUT))]


def linked() -> list[str]:
    """Files that documents link to and that are none: data, sources, pictures."""
    return sorted({path for path in _targets() if (ROOT / path).is_file()} - set(pages()))


def folders() -> list[str]:
    """Folders that documents link to."""
    return sorted({path for path in _targets() if (ROOT / path).is_dir()})


def rooms() -> dict[str, list[str]]:
    """Page of the reference -> the modules on it: one for each room, one for what lies beside the
    rooms, one for the environments' contract.
    """
    found: dict[str, list[str]] = {"reference/agentgym.md": [], "reference/envs.md": []}
    for path in sorted((ROOT / "agentgym").glob("*")):
        if path.is_dir() and (path / "__init__.py").is_file():
            found[f"reference/agentgym.{path.name}.md"] = _modules(path.rglob("*.py"))
    found["reference/agentgym.md"] = _modules((ROOT / "agentgym").glob("[!_]*.py"))
    found["reference/envs.md"] = _modules((ROOT / "envs").glob("[!_]*.py"))
    return found


def _modules(paths: Iterable[Path]) -> list[str]:
    parts = (path.relative_to(ROOT).with_suffix("").parts for path in paths)
    return sorted(".".join(part for part in each if part != "__init__") for each in parts)


def _title(page: str) -> str:
    return page.removeprefix("reference/").removesuffix(".md")


def _index(folder: str) -> str:
    return f"{folder}/index.md"


def _targets() -> Iterator[str]:
    """Paths in the repository that documents link to."""
    for page in pages():
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            path = (ROOT / page).parent.joinpath(target).resolve()
            if "://" not in target and path.is_relative_to(ROOT) and path.exists():
                yield str(path.relative_to(ROOT))

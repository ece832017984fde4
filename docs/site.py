"""Build the site: the repository's documents at their own paths, so that a link means the same
here and there, the files that they link to, and reference pages that are made from the code.

A line `<!-- site: NAME -->` in a page is replaced by what NAME makes: `cli`, `configuration`,
`changelog`, `api`. The addresses of former pages lead to their successors (REDIRECTS).
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("tutorials", "how-to", "concepts", "reference")
PAGES = (
    "*.md",
    *(f"docs/{kind}/*.md" for kind in KINDS),
    "docs/results/*.md",
    "*/README.md",
    "*/*/README.md",
)
LEFT_OUT = ("tests", "node_modules")  # and names that begin with a dot
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
REFERENCE = re.compile(r"^\[[\w -]+\]: (\S+)$", re.MULTILINE)  # `[name]: path`
MARKER = re.compile(r"^<!-- site: (\w+) -->$", re.MULTILINE)
COLUMNS = "96"  # of the commands' help

# former page -> {anchor: the section that has its content now}; "" is the page as a whole
REDIRECTS: dict[str, dict[str, str]] = {
    "docs/architecture": {
        "": "docs/concepts/architecture.md",
        "the-house": "docs/concepts/architecture.md#packages",
        "one-sample": "docs/concepts/one-sample.md",
        "promises": "docs/concepts/promises.md",
        "adding": "docs/concepts/architecture.md#where-to-add",
    },
    "docs/viewer": {
        "": "docs/reference/viewer.md",
        "pages": "docs/reference/viewer.md#pages",
        "take-away": "docs/reference/viewer.md#export-episodes",
        "the-index": "docs/reference/viewer-index.md#the-index",
        "who-may-look": "docs/reference/viewer-index.md#access",
    },
    "docs/reproduce": {
        "": "docs/reference/reproduce.md",
        "before": "docs/reference/reproduce.md#before-you-start",
        **{
            f"table-{anchor}": f"docs/reference/reproduce-tables.md#table-{anchor}"
            for anchor in (
                "1-webarena",
                "2-deep-search-searchqa",
                "3-textcraft",
                "4-babyai",
                "5-sciworld",
            )
        },
        "figure-1-all-models": "docs/reference/reproduce-tables.md#figure-1-all-models",
        **{
            anchor: f"docs/reference/reproduce-figures.md#{anchor}"
            for anchor in (
                "table-6-grpo-and-reinforce",
                "ppo-and-reinforce-with-a-growing-horizon",
                "schedules-of-the-horizon",
                "figures-6-and-7-reward-while-training",
                "figures-8-and-9-more-turns-more-samples",
            )
        },
        "the-same-claims-with-small-models": (
            "docs/reference/reproduce.md#the-same-claims-with-small-models"
        ),
    },
    "docs/adding": {
        "": "docs/how-to/add-to-the-algorithms.md",
        "an-advantage": "docs/how-to/add-an-advantage-or-loss.md#an-advantage",
        "a-loss": "docs/how-to/add-an-advantage-or-loss.md#a-loss",
        "a-training-loop": "docs/how-to/add-a-training-loop.md",
        "an-environment": "docs/how-to/add-a-built-in-environment.md",
        "a-step": "docs/how-to/add-to-the-pipeline.md#a-step",
        "a-metric": "docs/how-to/add-to-the-pipeline.md#a-metric",
    },
    "docs/operations": {
        "": "docs/how-to/nightly.md",
        "a-nightly-run": "docs/how-to/nightly.md",
        "where-the-time-goes": "docs/reference/metrics-time.md#where-the-time-goes",
        "is-it-learning": "docs/how-to/debug-a-run-that-does-not-learn.md",
        "evaluating-any-policy": "docs/how-to/evaluate-a-policy.md",
        "which-policy-is-better": "docs/how-to/compare-two-policies.md",
        "tables-whose-columns-are-environments": "docs/how-to/compare-in-several-environments.md",
        "which-model-is-champion": "docs/how-to/promote-and-roll-back.md",
        "the-pages-of-mlflow": "docs/reference/mlflow-pages.md",
        "loading-playing-and-serving-a-model": "docs/how-to/export-and-serve.md",
        "state": "docs/reference/state-folder.md",
        "fleets-on-kubernetes": "docs/how-to/kubernetes.md",
        "backup": "docs/how-to/backup-and-upgrade.md#backup",
        "restore": "docs/how-to/backup-and-upgrade.md#restore",
        "upgrade": "docs/how-to/backup-and-upgrade.md#upgrade",
        "how-weights-reach-the-engines": "docs/concepts/where-weights-go.md",
        "one-engine-for-a-run": "docs/concepts/one-engine-for-a-run.md",
        "rollouts-ahead-of-the-updates": "docs/concepts/rollouts-ahead.md",
        "memory-and-speed-of-an-update": "docs/how-to/memory-and-speed.md",
        "what-a-rank-holds": "docs/reference/memory-per-rank.md",
        "adapters": "docs/how-to/train-an-adapter.md",
        "on-a-gpu": "docs/how-to/gpu-first-hour.md",
        "alarms": "docs/reference/errors.md",
        "exit-code-2": "docs/reference/errors-configuration.md",
        "exit-code-3": "docs/reference/errors-evaluations.md",
        "exit-code-1-the-store": "docs/reference/errors-store.md",
        "exit-code-1-environments-and-episodes": "docs/reference/errors-environments.md",
        "exit-code-1-learning": "docs/reference/errors-learning.md",
        "exit-code-1-mlflow-ray-dvc": "docs/reference/errors-services.md",
        "what-an-environment-server-answers": "docs/reference/errors-environment-server.md",
        "services": "docs/reference/errors-services.md",
        "who-may-reach-what": "docs/reference/listening-addresses.md",
    },
}
REDIRECT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<link rel="canonical" href="{target}"><meta name="robots" content="noindex">
<script>location.replace(({anchors})[location.hash.slice(1)] || "{target}")</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
</head><body>This page moved to <a href="{target}">{target}</a>.</body></html>
"""


def on_config(config: Any) -> Any:
    """Complete the navigation: pages that mkdocs.yml does not name, results and the API.

    The links to edit a page need the address of the repository, in REPOSITORY_URL. The site's own
    address is `Documentation` in `project.urls` of pyproject.toml, where errors find it too.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.site_url = project.get("urls", {}).get("Documentation")
    named = set(_named(config.nav))
    rest = [path for path in pages() if path not in named]
    for entry in config.nav:
        for title, entries in entry.items():
            folder = f"docs/{title.lower().replace(' ', '-')}/"
            if isinstance(entries, list):
                entries += [path for path in rest if path.startswith(folder)]
    rest = [path for path in rest if path not in set(_named(config.nav))]
    results = [path for path in rest if path.startswith("docs/results/")]
    others = [path for path in rest if path not in results] + [_index(path) for path in folders()]
    api = [{_title(page): page} for page in rooms()]
    config.nav = [*config.nav, {"API": api}, {"Results": results}, {"More": others}]
    if address := os.environ.get("REPOSITORY_URL"):
        config.repo_url, config.repo_name = address, "Repository"
        config.edit_uri = "edit/main/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Replace the files of `docs_dir` by the repository's files at their paths in it."""
    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
    for path in [*pages(), "docs/site.css", *linked()]:
        file = File.generated(config, path, abs_src_path=str(ROOT / path))
        file.edit_uri = path if path.endswith(".md") else None
        files.append(file)
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
        # the package's own docstring comes first, under the page's title
        first = (
            f"::: {title}\n    options: {{heading_level: 1}}" if title in modules else f"# {title}"
        )
        parts = [first, *(f"::: {module}" for module in modules if module != title)]
        files.append(File.generated(config, path, content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill the markers, and let a link to a folder lead to its list of files."""
    here = Path(page.file.src_uri).parent
    markdown = MARKER.sub(lambda found: MAKERS[found[1]](), markdown)

    def to_index(found: re.Match[str]) -> str:
        target = (ROOT / here / found[1]).resolve()
        is_folder = target.is_dir() and str(target.relative_to(ROOT)) in folders()
        return (
            found[0].replace(found[1], f"{found[1].rstrip('/')}/index.md")
            if is_folder
            else found[0]
        )

    return LINK.sub(to_index, markdown)


def on_post_build(config: Any) -> None:
    """Write a page at each former address that leads to its successor, anchors included."""
    for former, anchors in REDIRECTS.items():
        folder = Path(config.site_dir) / former
        folder.mkdir(parents=True, exist_ok=True)
        up = "../" * len(Path(former).parts)
        to = {anchor: up + _address(target) for anchor, target in anchors.items()}
        target = html.escape(to.pop(""))
        text = REDIRECT.format(target=target, anchors=json.dumps(to))
        (folder / "index.html").write_text(text, encoding="utf-8")


def cli() -> str:
    """Help of every command of `agentgym`, as its parser prints it."""
    _own_sources()
    from agentgym.cli import _parser

    os.environ["COLUMNS"] = COLUMNS
    return "\n".join(_helps(_parser(), 3))


def configuration() -> str:
    """Every setting with its default and meaning, a table for each section."""
    _own_sources()
    from agentgym.commands.machine import _meaning
    from agentgym.config import RunConfig, settings

    lines: list[str] = []
    section = None
    for row in settings(RunConfig()):
        if row.section != section:
            section = row.section
            lines += ["", f"### {section or 'At the top'}", ""]
            lines += ["| | setting | default | meaning |", "|---|---|---|---|"]
        mark = "\\*" if row.changes_results else ""
        default = json.dumps(row.default).replace("|", "\\|")
        meaning = html.escape(_meaning(row), quote=False).replace("|", "\\|")
        lines.append(f"| {mark} | `{row.name}` | `{default}` | {meaning} |")
    return "\n".join(lines)


def changelog() -> str:
    """Return the entries of CHANGELOG.md, with links relative to `docs/reference`."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n")[2]
    return LINK.sub(
        lambda found: found[0] if "://" in found[1] else found[0].replace("](", "](../../", 1), text
    )


def api() -> str:
    """List of the pages of the API."""
    return "\n".join(f"- [{_title(page)}](../../{page})" for page in rooms())


MAKERS = {"cli": cli, "configuration": configuration, "changelog": changelog, "api": api}


def _helps(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for command in dict.fromkeys(action.choices.values()):
            yield f"{'#' * level} {command.prog}\n\n```text\n{command.format_help()}```\n"
            yield from _helps(command, min(level + 1, 4))


def _own_sources() -> None:
    """Import `agentgym` from this checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def _named(nav: Iterable[Any]) -> Iterator[str]:
    """Paths that the navigation names, at any depth."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
            continue
        for value in entry.values():
            yield from [value] if isinstance(value, str) else _named(value)


def _address(target: str) -> str:
    """Address in the site of `page.md#anchor`."""
    path, _, anchor = target.partition("#")
    return path.removesuffix(".md") + "/" + (f"#{anchor}" if anchor else "")


def pages() -> list[str]:
    """Paths of the documents, in order."""
    found = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if not name.startswith((".", *LEFT_OUT))]


def linked() -> list[str]:
    """Files that documents link to and that are no documents: data, sources, pictures."""
    return sorted({path for path in _targets() if (ROOT / path).is_file()} - set(pages()))


def folders() -> list[str]:
    """Folders that documents link to."""
    return sorted({path for path in _targets() if (ROOT / path).is_dir()})


def rooms() -> dict[str, list[str]]:
    """Page of the API -> the modules on it: a page for each package of agentgym, one for its
    loose modules, one for the environments' contract.
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
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in [*LINK.findall(text), *REFERENCE.findall(text)]:
            path = (ROOT / page).parent.joinpath(target).resolve()
            if "://" not in target and path.is_relative_to(ROOT) and path.exists():
                yield str(path.relative_to(ROOT))

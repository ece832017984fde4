"""The documents as a site: every link has a target, pages load no resource from a network, the
reference contains every documented public function, setting and command, and the addresses of
former pages lead to their successors.
"""

import ast
import html
import os
import re
import runpy
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from agentgym.cli import _parser
from agentgym.config import RunConfig, settings
from tests.completed import completed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
SITE = runpy.run_path(str(ROOT / "docs/site.py"))
KINDS, REDIRECTS = SITE["KINDS"], SITE["REDIRECTS"]
# tag -> the attribute whose URL a page loads
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


def build(folder, site):
    """Run `mkdocs build --strict` without network access. Return (code, output)."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    ended = completed(
        *command,
        cwd=folder,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9"),
        },
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    code, said = build(ROOT, folder)
    assert code == 0, said
    return folder


class Page(HTMLParser):
    """URLs that a page loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.ids = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if "id" in named:
            self.ids.add(named["id"])
        if named.get(LOADS.get(tag, "")) and named.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(named[LOADS[tag]])


def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {address for page in pages for address in Page(page).loads}
    assert any(address.endswith(".js") for address in loaded)
    assert any(address.endswith(".css") for address in loaded)
    foreign = re.compile(r"^(?:\w+:)?//")
    assert [address for address in loaded if foreign.match(address)] == []
    assert foreign.match("//fonts.googleapis.com/css")
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']+", styles) == []
    # the theme's script would load mermaid from another host
    assert [page for page in pages if 'class="mermaid"' in page.read_text()] == []


def test_every_public_function_that_says_what_it_does_is_in_the_reference(site):
    ids = {each for page in site.glob("reference/*/index.html") for each in Page(page).ids}
    wanted = set()
    for path in (ROOT / "agentgym").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if "__main__" in module:
            continue
        for node in ast.parse(path.read_bytes()).body:
            is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_named and not node.name.startswith("_") and ast.get_docstring(node):
                wanted.add(f"{module}.{node.name}")
    assert len(wanted) > 400
    assert sorted(wanted - ids) == []
    assert "agentgym.algorithms.advantages._centred" not in ids


def test_the_documents_themselves_are_pages_with_their_headings(site):
    home = Page(site / "index.html")
    assert {"two-commands", "results"} <= home.ids
    for path, heading in {
        "docs/tutorials/first-run": "",
        "docs/how-to/run-step-by-step": "change-parameters",
        "docs/concepts/architecture": "packages",
        "docs/reference/wire": "errors",
        "SECURITY": "ray",
        "docs/results/learn": "",
    }.items():
        page = Page(site / path / "index.html")
        assert not heading or heading in page.ids


def test_a_page_of_the_four_kinds_fits_a_screen_or_three():
    pages = [ROOT / "README.md", *(p for kind in KINDS for p in (ROOT / "docs" / kind).glob("*"))]
    assert len(pages) > 50
    assert {path.suffix for path in pages} <= {".md", ".png", ".svg"}
    for path in pages:
        if path.suffix == ".md":
            lines = path.read_text(encoding="utf-8").splitlines()
            assert len(lines) <= 150, path
            assert [line for line in lines if len(line) > 100] == [], path
    assert sorted(path.name for path in (ROOT / "docs").glob("*.md")) == []


def test_every_command_and_setting_is_in_the_reference(site):
    def text(page):
        return html.unescape((site / "docs/reference" / page / "index.html").read_text())

    commands = _parser()._subparsers._group_actions[0].choices
    assert len(commands) > 15
    assert [name for name in commands if f"usage: agentgym {name}" not in text("cli")] == []
    names = {row.name for row in settings(RunConfig())}
    assert len(names) > 100
    configuration = text("configuration")
    assert [name for name in sorted(names) if f"<code>{name}</code>" not in configuration] == []
    assert "0.1.0" in text("changelog")


def test_the_addresses_of_former_pages_lead_to_existing_sections(site):
    assert sorted(REDIRECTS) == [
        f"docs/{name}" for name in ("adding", "architecture", "operations", "reproduce", "viewer")
    ]
    for former, anchors in REDIRECTS.items():
        written = (site / former / "index.html").read_text()
        for anchor, target in anchors.items():
            path, _, section = target.partition("#")
            page = site / path.removesuffix(".md") / "index.html"
            assert page.is_file(), target
            assert not section or section in Page(page).ids, target
            assert f'"{anchor}": "../../{path.removesuffix(".md")}/' in written or not anchor
        assert f"url=../../{anchors[''].removesuffix('.md')}/" in written


def test_a_broken_link_and_a_broken_anchor_fail_the_build(tmp_path):
    listed = completed("git", "ls-files", "*.md", "docs", "mkdocs.yml", cwd=ROOT, check=True)
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    settings = yaml.safe_load((tmp_path / "mkdocs.yml").read_text())
    # without plugins, because the reference takes most of the time
    settings["plugins"] = []
    settings["nav"].append({"New": "NEW.md"})
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "NEW.md").write_text(
        "# New\n\n[a](docs/nowhere.md) [b](docs/concepts/gate.md#nowhere)\n"
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code, said = build(tmp_path, tmp_path / "site")
    assert code == 1
    assert "contains a link 'docs/nowhere.md', but the target is not found" in said
    assert re.search(
        r"contains a link 'docs/concepts/gate.md#nowhere', but the .* does not contain", said
    )

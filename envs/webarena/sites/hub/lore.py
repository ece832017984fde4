"""The words the code host's content is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """A project: path, description, language, license, topics, and the parts its issues are about."""

    path: str
    description: str
    language: str  # python, go or js
    license: str
    topics: tuple[str, ...]
    parts: tuple[str, ...]


DEMO = ("jlindgren", "Jonna Lindgren")
PEOPLE = (("mokonkwo", "Michael Okonkwo"), ("apetrov", "Anya Petrov"), ("dsilva", "Diego Silva"), ("tkoivisto", "Tuuli Koivisto"), ("rbanerjee", "Rohan Banerjee"), ("lmoreau", "Luc Moreau"), ("hnakata", "Hiro Nakata"), ("scarver", "Sadie Carver"), ("ewojcik", "Ewa Wojcik"), ("bfitz", "Brendan Fitz"), ("zalami", "Zineb Alami"), ("gtanaka", "Goro Tanaka"), ("pmwangi", "Peter Mwangi"), ("cdubois", "Camille Dubois"), ("jreyes", "Josefina Reyes"), ("nvolk", "Nils Volk"), ("ohart", "Olive Hart"), ("kstrand", "Kari Strand"), ("wbell", "Winston Bell"), ("ychoi", "Yuna Choi"), ("fadeyemi", "Femi Adeyemi"), ("iromano", "Ilaria Romano"))  # fmt: skip

PLANS = (
    Plan("jlindgren/tidebook", "A tide table for harbors, printed or on a watch", "python", "MIT", ("tides", "calendar", "python"), ("the harbor parser", "the PDF export", "the moon phase table", "time zones", "the watch layout")),
    Plan("jlindgren/seedbox-notes", "Plain text notes that sync over anything", "go", "Apache-2.0", ("notes", "sync", "cli"), ("the sync loop", "conflict files", "the search index", "encryption", "the config loader")),
    Plan("jlindgren/dotgarden", "My dotfiles, documented", "python", "Unlicense", ("dotfiles", "shell"), ("the installer", "the prompt theme", "backup links")),
    Plan("jlindgren/ferry-timetable", "Departures on an e-ink display", "python", "MIT", ("e-ink", "transport", "hardware"), ("the display driver", "the feed reader", "night mode", "the enclosure")),
    Plan("lanternworks/lantern", "A static site builder for small libraries", "python", "BSD-3-Clause", ("static-site", "templates", "libraries"), ("the template cache", "the image pipeline", "incremental builds", "the RSS feed", "the preview server")),
    Plan("lanternworks/wick", "Markdown with footnotes done right", "js", "MIT", ("markdown", "parser"), ("footnotes", "nested lists", "the tokenizer", "source maps")),
    Plan("lanternworks/gleam-theme", "The default theme of lantern", "js", "MIT", ("css", "theme"), ("the dark palette", "print styles", "the navigation bar", "font loading")),
    Plan("openquay/crane", "Job queue with honest retries", "go", "Apache-2.0", ("queue", "jobs", "reliability"), ("the retry policy", "the dashboard", "lease renewal", "the Postgres store", "graceful shutdown")),
    Plan("openquay/bollard", "Rate limits for HTTP services", "go", "Apache-2.0", ("rate-limit", "http", "middleware"), ("the token bucket", "the Redis backend", "response headers", "metrics")),
    Plan("openquay/manifest-lint", "Checks deployment manifests before they hurt", "python", "MIT", ("lint", "yaml", "ops"), ("the YAML loader", "rule 12", "the report format", "the pre-commit hook")),
    Plan("openquay/quay-docs", "Documentation of everything at Open Quay", "js", "CC-BY-4.0", ("documentation",), ("the install guide", "the search box", "the glossary", "broken links")),
    Plan("birdlab/whistle", "Recognises bird songs on a phone", "python", "GPL-3.0", ("audio", "birds", "machine-learning"), ("the spectrogram", "the model download", "the species list", "background recording", "the map view")),
    Plan("birdlab/nestbox-cam", "Firmware of the nest box camera", "go", "GPL-3.0", ("firmware", "camera"), ("the motion sensor", "the night light", "the SD card writer", "battery reports")),
    Plan("birdlab/field-guide", "Species pages as structured data", "js", "CC-BY-SA-4.0", ("data", "birds"), ("the Latin names", "the range maps", "audio credits", "the JSON schema")),
    Plan("mokonkwo/ledgerline", "Double-entry bookkeeping in plain text", "python", "MIT", ("accounting", "plain-text"), ("currency rounding", "the importer", "the balance report", "closing periods")),
    Plan("apetrov/knotwork", "Graph layouts that do not tangle", "js", "MIT", ("graphs", "svg", "layout"), ("edge routing", "label placement", "the force solver", "SVG export")),
    Plan("hnakata/inkstone", "Handwriting strokes to vector curves", "go", "Apache-2.0", ("vector", "handwriting"), ("the smoothing filter", "pressure data", "the curve fitter")),
    Plan("scarver/pantry", "What is in the cupboard and what to cook", "js", "AGPL-3.0", ("recipes", "inventory", "web"), ("the barcode scanner", "expiry reminders", "unit conversion", "the shopping list")),
    Plan("ewojcik/polyglot-cards", "Flash cards with spaced repetition", "python", "MIT", ("languages", "flash-cards"), ("the scheduler", "audio cards", "the deck importer", "statistics")),
    Plan("cdubois/atelier", "A color palette workbench", "js", "MIT", ("colors", "design"), ("the contrast checker", "palette export", "the color picker")),
)  # fmt: skip

LABELS = (("bug", "red", "Something is broken"), ("feature", "blue", "A wish"), ("documentation", "teal", "Words about the code"), ("performance", "orange", "Slow or hungry"), ("good first issue", "green", "A place to begin"), ("question", "purple", "Needs an answer"), ("needs triage", "gray", "Nobody has looked yet"))  # fmt: skip

ISSUE_TITLES = (
    ("{part} fails with an empty input", "bug"), ("{part} is slow on large files", "performance"), ("Document how {part} works", "documentation"), ("Allow switching off {part}", "feature"), ("Why does {part} need write access?", "question"), ("{part} breaks after upgrading to {version}", "bug"), ("Add tests for {part}", "good first issue"), ("{part} ignores the locale", "bug"), ("Show progress for {part}", "feature"), ("Memory grows while {part} runs", "performance"), ("Typo in the error message of {part}", "good first issue"), ("{part}: support for Windows paths", "feature"), ("Wrong result from {part} around midnight", "bug"), ("Remove deprecated options of {part}", "needs triage"),
)  # fmt: skip
ISSUE_BODIES = (
    "Steps to reproduce:\n\n1. Start from a clean checkout.\n\n2. Use {part} once.\n\n3. See the message.\n\nExpected: it works as in the previous release.",
    "We use {part} every day and would be glad about this. I can help with testing.",
    "I noticed this while reading about {part}. Version {version}, on Debian and on macOS alike.",
    "This came up in our weekly meeting. {part} is the last thing between us and the release.",
)
REMARKS = ("I can reproduce this.", "Could you attach the log?", "Fixed on main, please try again.", "Let us discuss this on Thursday.", "I would rather keep the default as it is.", "Thanks for the report!", "This is a duplicate of an older one, I think.", "I will take it.", "Looks good to me.", "Please add a line to the changelog.")
MERGE_TITLES = ("Rewrite {part} without globals", "Fix {part} on slow disks", "Speed up {part} by half", "Add a test for {part}", "Update the documentation of {part}", "Make {part} configurable", "Bump the version to {version}")
COMMITS = ("Fix {part} on big-endian machines", "Move {part} into its own module", "Explain {part} in the README", "Test {part} with real data", "Simplify {part}", "Update dependencies", "Prepare release {version}", "Revert a change to {part}", "Handle missing files in {part}")
BIOS = ("Writes small tools.", "Maintainer by accident.", "Reads other people's code for a living.", "Likes release notes.", "")
STATUSES = ("", "", "", "On vacation until Monday", "Reviewing", "Busy with the release")

SOURCES = {
    "python": (
        ("src/{module}/__init__.py", '"""{description}."""\n\n__version__ = "{version}"\n'),
        ("src/{module}/core.py", '"""The heart of {name}."""\n\nfrom dataclasses import dataclass\n\nMAX_RETRIES = {retries}\nTIMEOUT_SECONDS = {timeout}\n\n\n@dataclass(frozen=True)\nclass Entry:\n    name: str\n    size: int\n\n\ndef load(lines):\n    """Yield an Entry for each line that is not a comment."""\n    for line in lines:\n        if line.startswith("#"):\n            continue\n        name, size = line.split(",")\n        yield Entry(name.strip(), int(size))\n'),
        ("src/{module}/cli.py", 'import argparse\n\nfrom {module}.core import load\n\n\ndef main():\n    parser = argparse.ArgumentParser(prog="{name}")\n    parser.add_argument("path")\n    parser.add_argument("--port", type=int, default={port})\n    args = parser.parse_args()\n    with open(args.path) as lines:\n        for entry in load(lines):\n            print(entry.name, entry.size)\n'),
        ("tests/test_core.py", 'from {module}.core import load\n\n\ndef test_comments_are_skipped():\n    assert list(load(["# nothing"])) == []\n'),
        ("pyproject.toml", '[project]\nname = "{name}"\nversion = "{version}"\nrequires-python = ">=3.{minor}"\nlicense = "{license}"\n'),
    ),
    "go": (
        ("go.mod", "module code.test/{path}\n\ngo 1.{minor}\n"),
        ("main.go", 'package main\n\nimport "fmt"\n\nconst (\n\tdefaultPort = {port}\n\tmaxRetries  = {retries}\n\ttimeout     = {timeout} // seconds\n)\n\nfunc main() {{\n\tfmt.Println("{name} {version}, port", defaultPort)\n}}\n'),
        ("internal/store/store.go", "package store\n\n// Store keeps entries by name.\ntype Store struct {{\n\tentries map[string]int\n}}\n\n// New returns an empty store.\nfunc New() *Store {{\n\treturn &Store{{entries: map[string]int{{}}}}\n}}\n"),
        ("internal/store/store_test.go", 'package store\n\nimport "testing"\n\nfunc TestNewIsEmpty(t *testing.T) {{\n\tif len(New().entries) != 0 {{\n\t\tt.Fatal("not empty")\n\t}}\n}}\n'),
        ("config.example.toml", 'port = {port}\nretries = {retries}\ntimeout_seconds = {timeout}\n'),
    ),
    "js": (
        ("package.json", '{{\n  "name": "{name}",\n  "version": "{version}",\n  "license": "{license}",\n  "type": "module",\n  "engines": {{ "node": ">={minor}" }}\n}}\n'),
        ("src/index.js", 'import {{ options }} from "./options.js";\n\nexport function start(settings = {{}}) {{\n  const merged = {{ ...options, ...settings }};\n  return merged.port;\n}}\n'),
        ("src/options.js", "export const options = {{\n  port: {port},\n  retries: {retries},\n  timeoutSeconds: {timeout},\n}};\n"),
        ("test/index.test.js", 'import assert from "node:assert";\nimport {{ start }} from "../src/index.js";\n\nassert.equal(start(), {port});\n'),
        ("styles/main.css", ":root {{\n  --accent: {color};\n  --radius: 6px;\n}}\n"),
    ),
}  # fmt: skip
README = "# {name}\n\n{description}.\n\n## Installation\n\nCurrent version: {version}. It listens on port {port} unless told otherwise.\n\n## Configuration\n\nUp to {retries} retries, each ended after {timeout} seconds.\n\n## License\n\n{license}\n"
CONTRIBUTING = "# Contributing\n\nOpen an issue before a large change. Branches are named after the issue, for example `42-fix-{word}`. A change needs one approval.\n"
CHANGELOG = "# Changelog\n\n## {version}\n\n- Faster start\n- {part}: clearer messages\n\n## {before}\n\n- First public release\n"

"""`agentgym config | doctor`: list every setting, and check this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from agentgym.commands.parser import Commands
from agentgym.config import RunConfig, settings
from agentgym.console.ending import say

MEANINGS_AT = 40  # column of `agentgym config`


def add(commands: Commands) -> None:
    config = commands.add("config", _config, "every setting, its value, default and meaning")
    config.add_argument("--json", action="store_true")
    doctor = commands.add("doctor", _doctor, "what is missing on this machine")
    doctor.add_argument("--json", action="store_true")


def _config(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    rows = list(settings(cfg))
    if arguments.json:
        say(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    say("* changes results; what has none changes where and how fast they are computed")
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            say(f"\n{section}")
        value, default = (json.dumps(item) for item in (row.value, row.default))
        changed = "" if value == default else f" (default {default})"
        mark = "*" if row.changes_results else " "
        shown = f"{mark} {row.name:<21}{value + changed}"
        if len(shown) >= MEANINGS_AT:
            say(shown)
            shown = ""
        say(f"{shown:<{MEANINGS_AT}}{row.description}")
    return 0


def _doctor(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.doctor import examine

    findings = examine(cfg)
    if arguments.json:
        say(json.dumps([asdict(finding) for finding in findings]))
    else:
        width = max(12, *(len(finding.name) + 1 for finding in findings))
        for finding in findings:
            say(f"{finding.name:<{width}}{finding.state:<9}{finding.text}")
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1

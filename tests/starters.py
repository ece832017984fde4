"""The templates of `agentgym new`, for tests that install what it writes."""

from string import Template

from agentgym.commands.new import STARTERS

GAME, RECIPE = (
    Template((STARTERS / kind / "src/module.py.tmpl").read_text(encoding="utf-8"))
    for kind in ("environment", "recipe")
)

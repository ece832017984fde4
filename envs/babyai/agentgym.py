"""The routes of AgentGym's own BabyAI server."""

from __future__ import annotations

from envs.dialect import common

DIALECT = common("This is environment BabyAI.")

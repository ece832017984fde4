"""A registered model on a real MLflow, whose versions solved as many items as a test chooses."""

import numpy as np

from agentgym.config import GateConfig
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.paired import Pair
from agentgym.evaluation.question import TAG as QUESTION
from agentgym.evaluation.registry import Promotions
from agentgym.store.runstore import store_at
from agentgym.tracking.registry import alias_version

RULES = GateConfig()


class Registry:
    """Registered model whose versions solved given numbers of 200 items."""

    def __init__(self, tracker, folder, name):
        self.tracker, self.name = tracker, name
        self.store = self.store_in(folder / "store")
        tracker.client.create_registered_model(name)
        self.solved = {}

    def store_in(self, folder):
        return store_at(folder, lease_ttl_s=30.0)

    def promotions(self):
        return Promotions(self.store, self.tracker, self.name, "champion")

    def version(self, solved, question=None, **of_run):
        tags = {"step_key": f"{len(self.solved):064x}", "run_key": "a" * 64}
        if question is not None:
            tags[QUESTION] = question.to_json()
        run = self.tracker.client.create_run(self.tracker.experiment_id, tags=of_run).info
        made = self.tracker.client.create_model_version(
            self.name, f"{run.artifact_uri}/model", run_id=run.run_id, tags=tags
        )
        self.solved[tags["step_key"]] = solved
        return self.promotions().version(str(made.version))

    def evidence(self, candidate, champion, **known):
        def table(version):
            done = self.solved[version.checkpoint] if version else np.nan
            row = np.arange(200) < done if version else np.full(200, np.nan)
            return np.asarray(row, dtype=float)[:, None]

        items = tuple(f"babyai_{row}" for row in range(200))
        pair = Pair(items, (None,) * 200, table(champion), table(candidate))
        return Evidence({"babyai": pair}, champion is not None, **known)

    def consider(self, candidate, asked=None, rules=RULES, **known):
        return self.promotions().consider(
            candidate,
            rules,
            lambda champion: self.evidence(candidate, champion, **known),
            asked or candidate.checkpoint,
        )

    @property
    def holder(self):
        return alias_version(self.tracker, self.name, "champion")

    @property
    def entries(self):
        return self.promotions().history.entries()

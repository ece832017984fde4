"""Results of `agentgym compare` on real policies are committed, with one page for each."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
RESULT = json.loads((RESULTS / "versus.json").read_text())
ASKED = ("two-checkpoints", "two-seeds", "itself", "against-the-warm-start")


def test_a_policy_beside_itself_ties_on_every_item_and_others_do_not():
    for name in ASKED:
        for contrast in RESULT[name]["contrasts"]:
            for each in contrast["envs"].values():
                won, lost = len(each["wins"]), len(each["losses"])
                assert won + lost + each["num_ties"] == each["num_items"]
                assert (won + lost == 0) is contrast["same_policy"] is (name == "itself")
                assert (each["p_adjusted"] < 0.05) is (each["verdict"] != "not shown")


def test_every_answer_has_a_page_that_loads_nothing():
    for name in ASKED:
        page = (RESULTS / "versus" / f"{name}.html").read_text()
        assert "default-src 'none'" in page
        assert "<script" not in page
        assert "against turns" in page

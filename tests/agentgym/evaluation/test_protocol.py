"""A protocol is a validated file; its digest covers exactly the settings that change a result."""

import json

import pytest
import yaml

from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.data.items import DataError
from agentgym.evaluation.protocol import items_of, load_protocol, protocol_from, protocol_of_run

BABYAI = {"env": {"name": "babyai", "options": {"levels": ["GoToObj"]}}, "max_turns": 20}
TEXTCRAFT = {"env": {"name": "textcraft"}, "max_turns": 30, "temperature": 0.5, "num_samples": 4}


def two():
    return protocol_from({"envs": [BABYAI, TEXTCRAFT], "concurrency": 8}, {})


def test_each_environment_has_its_own_turns_temperature_format_items_and_samples(tmp_path):
    file = tmp_path / "mine.yaml"
    own = {**BABYAI, "items": {"num": 3}, "action_format": "react", "greedy": True}
    file.write_text(yaml.safe_dump({"envs": [own, TEXTCRAFT], "follows": "nobody"}))
    found = load_protocol(str(file))
    first, second = found.envs
    assert (found.name, found.follows) == ("mine", "nobody")
    assert (first.max_turns, first.temperature, first.action_format) == (20, 1.0, "react")
    assert (second.max_turns, second.temperature, second.num_samples) == (30, 0.5, 4)
    assert (first.sample_numbers, second.sample_numbers) == ((0, 1), (1, 2, 3, 4))
    assert load_protocol("mine", folder=tmp_path) == found
    changed = load_protocol(
        "mine", {"max_turns": 7, "items": {"split": "validation"}, "seed": 3}, folder=tmp_path
    )
    assert [each.max_turns for each in changed.envs] == [7, 7]
    assert (changed.seed, changed.envs[0].items.num, changed.envs[0].items.split) == (
        3,
        3,
        "validation",
    )
    assert changed.only(["textcraft"]).env_configs[0].name == "textcraft"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"envs": [{**BABYAI, "max_rounds": 3}]}, "unknown key envs.0.max_rounds; did you mean"),
        ({"envs": [BABYAI, BABYAI]}, "different names"),
        ({"envs": []}, "envs"),
        ({"envs": [{**BABYAI, "items": {"ids": ["textcraft_1"]}}]}, "no item of babyai"),
        ({"envs": [{**BABYAI, "items": {"ids": ["babyai_1", "babyai_1"]}}]}, "twice"),
        ({"envs": [{**BABYAI, "max_new_tokens": 9000}]}, "leaves no room"),
        ({"envs": [{**BABYAI, "instructions": False, "examples": 1}]}, "follow the instructions"),
        ({"envs": [{**BABYAI, "examples": -1}]}, "envs.0.examples"),
        ({"envs": [{**BABYAI, "env": {"name": "babyai", "weight": 2.0}}]}, "weight"),
    ],
)
def test_a_wrong_protocol_is_refused_in_one_line(tree, said):
    with pytest.raises(ConfigError, match=said) as refused:
        protocol_from(tree, {})
    assert "\n" not in str(refused.value)


def test_a_name_that_is_none_is_told_with_those_there_are(tmp_path):
    (tmp_path / "published.yaml").write_text("envs: []")
    with pytest.raises(ConfigError, match="known: published"):
        load_protocol("publisht", folder=tmp_path)
    with pytest.raises(ConfigError, match="has no environment 'sciworld'"):
        two().only(["sciworld"])


def test_where_and_how_fast_it_is_played_is_not_in_its_identity():
    moved = protocol_from(
        {
            "envs": [
                {**BABYAI, "env": {**BABYAI["env"], "endpoints": ["http://127.0.0.1:1"]}},
                TEXTCRAFT,
            ],
            "concurrency": 2,
            "fail_on_error": 5,
            "name": "x",
        },
        {},
    )
    assert moved.semantic() == two().semantic()
    assert (moved.errors_allowed(100), two().errors_allowed(100)) == (5, 100)
    share = protocol_from({"envs": [BABYAI], "fail_on_error": 0.1}, {})
    first = protocol_from({"envs": [BABYAI], "fail_on_error": True}, {})
    assert (share.errors_allowed(50), first.errors_allowed(50)) == (5, 0)
    other = protocol_from({"envs": [{**BABYAI, "max_turns": 21}, TEXTCRAFT]}, {})
    assert other.semantic() != two().semantic()


def test_items_come_from_a_split_a_list_or_a_file(tmp_path):
    for name, first, count in (("train/babyai_train", 0, 40), ("eval/babyai_test", 100, 5)):
        (tmp_path / name).parent.mkdir()
        ids = [{"item_id": f"babyai_{task}"} for task in range(first, first + count)]
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
    cfg = RunConfig.model_validate({"data": {"path": tmp_path}})

    def ids(**items):
        found = items_of(protocol_from({"envs": [{**BABYAI, "items": items}]}, {}), cfg)
        return [item.item_id for item in found["babyai"]]

    assert ids() == [f"babyai_{task}" for task in range(100, 105)]
    assert ids(num=2) == ["babyai_100", "babyai_101"]
    assert ids(ids=["babyai_9", "babyai_3"]) == ["babyai_9", "babyai_3"]
    file = tmp_path / "mine.json"
    file.write_text('[{"item_id": "babyai_7"}]')
    assert ids(file=str(file)) == ["babyai_7"]
    with pytest.raises(ConfigError, match="more than the 5 items"):
        ids(num=6)
    for wrong, said in (("textcraft_1", "no items of babyai"), ("babyai_x", "end in no number")):
        file.write_text(json.dumps([{"item_id": wrong}]))
        with pytest.raises(ConfigError, match=said):
            ids(file=str(file))
    with pytest.raises(ConfigError, match="does not exist"):
        ids(file=str(tmp_path / "none.json"))


def test_the_published_protocol_without_its_data_names_the_command_that_brings_them(
    tmp_path, monkeypatch
):
    protocol = load_protocol("agentgym-rl").only(["babyai"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"babyai_test.json does not exist; run `agentgym data imp"):
        items_of(protocol, RunConfig())
    (tmp_path / "data/hub").mkdir(parents=True)
    (tmp_path / "data/hub/AgentGym-RL-Data-ID.dvc").touch()  # the data set was imported
    with pytest.raises(DataError, match=r"run `dvc pull data/hub/AgentGym-RL-Data-ID.dvc`"):
        items_of(protocol, RunConfig())


def test_a_runs_own_protocol_is_that_of_its_evaluations():
    cfg = load_config(
        "params.yaml", ["evaluation.num_items=8", "evaluation.num_samples=3", "evaluation.k=[1]"]
    )
    found = protocol_of_run(cfg, ["babyai", "textcraft"], {"concurrency": 4})
    babyai, textcraft = found.envs
    assert (babyai.env.options, textcraft.env.options) == (cfg.env.options, {})
    assert (babyai.items.num, babyai.num_samples, babyai.greedy) == (8, 3, True)
    assert (babyai.max_turns, babyai.max_new_tokens, found.seed) == (12, 6, 1)
    assert found.concurrency == 4

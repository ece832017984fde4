"""Every bad input gives one line that says what was expected, what came and what to do."""

import json

import pytest
from pydantic import ValidationError

from agentgym.cli import main
from agentgym.config import (
    ConfigError,
    OptimizerConfig,
    RunConfig,
    config_digest,
    load_config,
    settings,
)
from envs.babyai import DEFAULTS as BABYAI


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser: {lr: 0.1}", "unknown key optimiser; did you mean optimizer?"),
        (
            "rollout: {system_prompt: true}",
            "unknown key rollout.system_prompt; did you mean rollout.instructions?",
        ),
        (
            "rollout: {group_sizes: 4}",
            "unknown key rollout.group_sizes; did you mean rollout.group_size?",
        ),
        (
            "warm_start: {optimizer: {learning_rate: 1}}",
            "unknown key warm_start.optimizer.learning_rate; known: betas, final_lr_fraction",
        ),
        (
            "rollout: {group_size: many}",
            (
                "rollout.group_size: input should be a valid integer, unable to parse string as an"
                " integer"
            ),
        ),
        (
            "rollout: {group_size: 0}",
            "rollout.group_size: input should be greater than 0, got 0 (int)",
        ),
        ("optimizer: {lr: .inf}", "optimizer.lr: input should be a finite number"),
        ("optimizer: {lr: .nan}", "optimizer.lr: input should be"),
        (
            "rollout: {temperature: 0}",
            "rollout.temperature: input should be greater than 0, got 0 (int)",
        ),
        (
            "horizon: {max_turns: [4, 12, 8], stage_steps: [1, 1, 1]}",
            "horizon.max_turns [4, 12, 8] must not decrease; sort it or use a fixed horizon",
        ),
        (
            "horizon: {max_turns: [4, 8], stage_steps: [1]}",
            "horizon.stage_steps [1] has 1 values for 2 stages; give one number",
        ),
        (
            "horizon: {kind: fixed, max_turns: [4, 8], stage_steps: [1, 1]}",
            "has 2 values; a fixed horizon takes one",
        ),
        (
            "rollout: {group_size: 1}",
            (
                "rollout.group_size 1 leaves grpo nothing to compare; use at least 2, or a recipe"
                " without groups"
            ),
        ),
        (
            "model: {context_tokens: 100}",
            (
                "model.context_tokens 100 is too small for 12 turns of rollout.max_new_tokens 6 +"
                " observation_tokens 32 = 456; raise it"
            ),
        ),
        (
            "rollout: {concurrency: 999}",
            (
                "rollout.concurrency 999 is above env.max_sessions 256 (babyai); lower it or raise"
                " the other"
            ),
        ),
        (
            "algorithm: {truncated: bootstrap}",
            "bootstrap needs a critic, and recipe grpo has none; use zero or mask, or ppo",
        ),
        (
            "algorithm: {recipe: grpo, kl_coef: 0.01, kl_place: reward}",
            (
                "algorithm.kl_place reward with recipe grpo, which divides by the deviation of each"
                " group"
            ),
        ),
        (
            "algorithm: {recipe: dapo, kl_coef: 0.01, kl_place: reward, kl_estimator: k1}",
            "use kl_place loss, or a recipe that does not",
        ),
        (
            "algorithm: {recipe: grpo, kl_coef: 0.01, kl_estimator: k1}",
            (
                "algorithm.kl_estimator k1 with kl_place loss (recipe grpo) has no expected"
                " gradient and holds the policy to nothing"
            ),
        ),
        (
            "algorithm: {recipe: ppo, kl_coef: 0.01, kl_place: loss}",
            "use kl_estimator k2 or k3, or kl_place reward",
        ),
        (
            "algorithm: {recipe: dapo, truncated: mask}",
            "algorithm.truncated mask empties the groups that dapo compares; use zero",
        ),
        (
            "{deterministic: true, rollout: {max_staleness: 1}}",
            "rollout.max_staleness 1 overlaps rollouts with the update",
        ),
        (
            "horizon: {kind: adaptive, max_turns: [4, 4], stage_steps: [9]}",
            "an adaptive horizon must grow from value to value",
        ),
        (
            "horizon: {kind: adaptive, max_turns: [4, 8], stage_steps: [9, 9]}",
            "has 2 values; an adaptive horizon is one stage",
        ),
        (
            "algorithm: {recipe: gpro}",
            "algorithm.recipe 'gpro' is unknown; known: agent_evol, cispo, dapo",
        ),
        (
            "{algorithm: {recipe: sft}, warm_start: {enabled: false}}",
            (
                "recipe sft learns from demonstrations, and warm_start.enabled false makes none;"
                " enable it, or use dpo"
            ),
        ),
        (
            "algorithm: {recipe: dpo, kl_coef: 0.1}",
            "algorithm.kl_coef means nothing to recipe dpo; its settings: beta",
        ),
        (
            "{algorithm: {recipe: agent_evol}, rollout: {max_staleness: 1}}",
            "rollout.max_staleness 1 means nothing to recipe agent_evol",
        ),
        (
            (
                "{algorithm: {recipe: dpo}, horizon: {kind: adaptive, max_turns: [4, 8],"
                " stage_steps: [9]}}"
            ),
            (
                "horizon.kind adaptive follows success step by step, which recipe dpo does not"
                " sample; use stepwise"
            ),
        ),
        (
            "{algorithm: {recipe: dpo}, rollout: {group_size: 1}}",
            "rollout.group_size 1 leaves dpo nothing to compare",
        ),
        (
            "evaluation: {k: [1, 8]}",
            "evaluation.k [1, 8] needs num_samples >= 8, got 4; pass@k is undefined for n < k",
        ),
        (
            "model: {source: hub}",
            "model.name is empty; with source hub name a repository or folder",
        ),
        ("model: {hidden_size: 64, num_heads: 4}", "must be a whole head dimension >= 32 (vLLM)"),
        (
            "model: {hidden_size: 128, num_heads: 4, num_kv_heads: 3}",
            "model.num_heads 4 must be a multiple of num_kv_heads 3",
        ),
        ("model: 5", "model: input should be a valid dictionary"),
        ("[1, 2]", "must hold a mapping of sections, got list"),
        ("rollout: {group_size: [}", "is not valid YAML: "),
    ],
)
def test_a_bad_file_gives_its_line(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.lr",
            "override 'optimizer.lr' must look like key.path=value, for example optimizer.lr=3e-4",
        ),
        ("=3", "must look like key.path=value"),
        ("seed.x=3", "override 'seed.x=3': seed is a value, not a section"),
        ("seed=-1", "seed: input should be greater than or equal to 0, got -1 (int)"),
        ("rollout.grup_size=4", "unknown key rollout.grup_size; did you mean rollout.group_size?"),
        ("optimizer.lr=inf", "optimizer.lr: input should be a finite number"),
    ],
)
def test_a_bad_override_gives_its_line(write, override, message):
    assert message in refusal(write("seed: 1"), override)


def test_a_missing_file_is_named(tmp_path):
    assert (
        f"parameter file {tmp_path / 'none.yaml'} does not exist; run from the project's root"
        in refusal(tmp_path / "none.yaml")
    )


def test_a_key_file_is_not_read_as_parameters(write, tmp_path):
    secret = write("token: [abc", "credentials")
    assert refusal(secret) == f"parameter file {secret} must end in .yaml or .yml"
    assert (
        refusal(write(f"extends: {secret}")) == f"parameter file {secret} must end in .yaml or .yml"
    )
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not valid YAML" in refusal(tmp_path / "binary.yaml")


def bomb(depth=9, width=9):
    lines = [f"a0: &a0 [{', '.join('x' * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join([*lines, f"env: {{options: {{levels: *a{depth - 1}}}}}"])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [bomb(), "env: {options: &loop {levels: [*loop]}}"])
def test_aliases_without_end_are_refused_at_once(write, text):
    assert "unfolds to more than 100000 values; write fewer, or without aliases" in refusal(
        write(text)
    )


def test_aliases_of_a_person_are_understood(write):
    config = load_config(
        write(
            "{env: &env {options: {levels: &levels [A]}}, mix: [{name: other, options: {levels:"
            " *levels}}]}"
        )
    )
    assert config.mix[0].options == config.env.options


@pytest.mark.parametrize(
    "overrides",
    [
        ("compute=ray", "ray.address=203.0.113.5:6379"),
        ("compute=ray", "ray.address='[2001:db8::5]:6379'"),
        ("compute=ray", "ray.address=cluster.example:6379"),
        ("compute=ray-job", "ray.address=http://cluster.example:8265/"),
    ],
)
def test_a_cluster_elsewhere_must_be_named_by_the_machine_too(write, monkeypatch, overrides):
    path, address = write("seed: 1"), overrides[1].partition("=")[2].strip("'/")
    assert f"ray.address {address} is on another machine" in refusal(path, *overrides)
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert f"if you trust it, export RAY_ADDRESS={address}" in refusal(path, *overrides)
    monkeypatch.setenv("RAY_ADDRESS", address)
    load_config(path, overrides)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:6379", "localhost:6379", "auto", "'[::1]:6379'", "''"]
)
def test_a_cluster_of_this_machine_is_not_asked_for_twice(write, address):
    load_config(write("compute: ray"), [f"ray.address={address}"])


def test_credentials_go_to_no_mlflow_server_of_a_files_choice(write, monkeypatch):
    path = write("tracking: {uri: 'https://mlflow.example'}")
    load_config(path)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")
    assert (
        "tracking.uri https://mlflow.example is on another machine and would get the credentials"
        in refusal(path)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example/")
    load_config(path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    load_config(path, ["tracking.uri=http://127.0.0.1:5000"])


def test_overrides_win_over_the_file_and_understand_exponents(write):
    config = load_config(
        write("{seed: 1, optimizer: {lr: 1}}"),
        ["optimizer.lr=3e-4", "horizon.max_turns=[2,3,4]", "env.endpoints=[a, b]"],
    )
    assert (config.seed, config.optimizer.lr, config.horizon.max_turns, config.env.endpoints) == (
        1,
        3e-4,
        (2, 3, 4),
        ("a", "b"),
    )


def test_a_quoted_override_stays_text(write):
    assert load_config(write("seed: 1"), ["model.revision='12e4567'"]).model.revision == "12e4567"


def test_an_empty_file_means_the_defaults(write):
    assert load_config(write("")) == RunConfig()


def test_every_default_has_one_home():
    """What a file leaves out is what params.yaml says; an environment's options have their home
    with it.
    """
    shipped = load_config("params.yaml")
    assert shipped.env.options == BABYAI
    own = shipped.env.model_copy(update={"options": {}})
    assert shipped.model_copy(update={"env": own}) == RunConfig()


def test_every_setting_is_described_once():
    described = list(settings(RunConfig()))
    assert [each.name for each in described if not each.description] == []
    assert len({(each.section, each.name) for each in described}) == len(described) > 100
    assert {each.name for each in described if each.section == "warm_start.optimizer"} == set(
        OptimizerConfig.model_fields
    )


def test_the_command_prints_what_was_changed_beside_its_default(write, capsys):
    path = str(write("{rollout: {group_size: 4, concurrency: 8}}"))
    assert main(["config", "--params", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    (group_size,) = (line for line in lines if line[2:].startswith("group_size"))
    assert group_size.startswith("* group_size")
    assert "4 (default 8)" in group_size
    (concurrency,) = (line for line in lines if line.startswith("  concurrency"))
    assert concurrency.split(maxsplit=2)[2] == "(default 256)  episodes in flight"
    assert main(["config", "--params", path, "--json"]) == 0
    values = {(e["section"], e["name"]): e for e in json.loads(capsys.readouterr().out)}
    assert values["rollout", "group_size"]["value"] == 4
    assert values["rollout", "group_size"]["changes_results"]
    assert not values["store", "path"]["changes_results"]


def test_extends_lays_one_file_over_another(write):
    write(
        "{seed: 1, rollout: {group_size: 4, items_per_step: 2}, env: {options: {levels: [A], view:"
        " compact}}}",
        "base.yaml",
    )
    config = load_config(
        write(
            "{extends: ../base.yaml, rollout: {group_size: 6}, env: {options: {view: agentgym}}}",
            "profiles/x.yaml",
        )
    )
    assert (config.seed, config.rollout.group_size, config.rollout.items_per_step) == (1, 6, 2)
    assert config.env.options == {"view": "agentgym"}  # options of two environments must not mix


def test_a_missing_base_is_named(write):
    assert "gone.yaml does not exist" in refusal(write("extends: gone.yaml"))


def test_files_that_extend_each_other_are_refused(write):
    write("extends: params.yaml", "other.yaml")
    assert "extends itself" in refusal(write("extends: other.yaml"))


def test_what_changes_only_where_or_how_fast_stays_out_of_the_keys(write):
    path = write("seed: 1")
    reference = config_digest(load_config(path).semantic())
    for override in (
        "store.path=/elsewhere",
        "rollout.concurrency=3",
        "env.endpoints=[x]",
        "tracking.uri=x",
        "data.path=x",
        "evaluation.chunk_items=1",
    ):
        assert config_digest(load_config(path, [override]).semantic()) == reference, override
    for override in (
        "seed=2",
        "optimizer.lr=1",
        "env.options={a: 1}",
        "rollout.group_size=3",
        "deterministic=true",
        "horizon.max_turns=[1,2,3]",
        "rollout.episode_timeout_s=5",
        "rollout.max_attempts=1",
        "rollout.max_env_error_frac=0.5",
        "evaluation.min_coverage=0.5",
    ):
        assert config_digest(load_config(path, [override]).semantic()) != reference, override
    semantic = load_config(path).semantic()
    assert "path" not in semantic["data"]
    assert "concurrency" not in semantic["rollout"]


def test_a_loaded_configuration_cannot_change(write):
    with pytest.raises(ValidationError, match="frozen"):
        load_config(write("seed: 1")).seed = 2

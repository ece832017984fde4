"""Every invalid input gives one line: what was expected, what was given and how to fix it."""

import pytest

from agentgym.config import ConfigError, RunConfig, load_config


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
            "rollout: {engine_logprobs: 0.25}",
            (
                "rollout.engine_logprobs 0.25 with algorithm.correction token_truncate: it corrects"
                " by the engine's log-probability of each token; use rollout.engine_logprobs 1, or"
                " correction none"
            ),
        ),
        (
            "{algorithm: {correction: none}, rollout: {max_staleness: 1}}",
            "rollout.max_staleness 1 samples with older weights, for which algorithm.correction",
        ),
        (
            "algorithm: {correction: none, importance_floor: 0.5}",
            "importance_floor 0.5 means nothing to correction none, which has none; leave it out",
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
        ("seed: 1\nenv: {name: babyai}\nseed: 2", "the key 'seed' stands here twice"),
        ("optimizer: {lr: 1, clip: 2, lr: 3}", "the key 'lr' stands here twice"),
        ("seed: 2026-99-99", "seed: input should be a valid integer"),
        ("seed: !!int x", "is not valid YAML: invalid literal for int()"),
        ("seed: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("env: {options: {levels: !!set {a}}}", "could not determine a constructor for the tag"),
        ("env: {options: {a: !!binary aGk=}}", "could not determine a constructor for the tag"),
        ("algorithm: {recipe: [grpo]}", "algorithm.recipe: expected a name such as grpo, got ["),
        ("seed: " + "[" * 500 + "]" * 500, "is nested more than 100 levels deep; write it flat"),
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
        (f"seed={2**64}", "seed: input should be less than 9223372036854775808"),
        (f"evaluation.seed={2**63}", "evaluation.seed: input should be less than"),
        ("rollout.grup_size=4", "unknown key rollout.grup_size; did you mean rollout.group_size?"),
        ("optimizer.lr=inf", "optimizer.lr: input should be a finite number"),
        ("algorithm.recipe=[a]", "algorithm.recipe: expected a name such as grpo, got ['a']"),
        ("seed=2026-99-99", "seed: input should be a valid integer"),
        ("seed=!!int x", "seed: input should be a valid integer"),
        ("seed=" + "[" * 500 + "]" * 500, "is nested more than 100 levels deep; write it flat"),
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
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(), "unfolds to more than 100000 values; write fewer, or without aliases"),
        ("env: {options: &loop {levels: [*loop]}}", "is nested more than 100 levels deep"),
    ],
)
def test_aliases_without_end_are_refused_at_once(write, text, message):
    assert message in refusal(write(text))


def test_a_date_among_the_options_is_text_and_a_merged_key_may_be_overridden(write):
    dated = load_config(write("env: {options: {since: 2026-01-02}}"))
    assert dated.semantic()["env"]["options"] == {"since": "2026-01-02"}
    merged = "mix: []\nenv: {options: {a: &b {x: 1, y: 2}, c: {<<: *b, y: 3}}}"
    assert load_config(write(merged)).env.options["c"] == {"x": 1, "y": 3}


def test_aliases_of_a_person_are_understood(write):
    config = load_config(
        write(
            "{env: &env {options: {levels: &levels [A]}}, mix: [{name: other, options: {levels:"
            " *levels}}]}"
        )
    )
    assert config.mix[0].options == config.env.options


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

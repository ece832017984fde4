"""A checkpoint is one model version, which loads with its chat template."""

import json
import urllib.request
from pathlib import Path

import pytest

from agentgym.tracking.registry import (
    FILES,
    ModelChanged,
    fetch_version,
    register_model,
    verified_model,
)

RUN_KEY, KEY = "12" * 32, "ab" * 32
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A Qwen2 of a few thousand parameters with a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    core = Tokenizer(
        models.WordLevel({"<unk>": 0, "<eos>": 1, "go": 2, "left": 3, "right": 4}, "<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen2Config(
        vocab_size=5,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def mlflow_at(tracker):
    """The `mlflow` module, set to this test's store."""
    import mlflow

    tracker.client  # noqa: B018  sets MLflow's environment first
    mlflow.set_tracking_uri(tracker.uri)
    yield mlflow
    mlflow.set_tracking_uri(None)


@pytest.fixture
def champion(tracker, model_dir):
    """The first version of `tiny` holds the alias."""
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    tags = {"step_key": KEY}
    register_model(tracker, run, model_dir, name="tiny", alias="champion", tags=tags, step=1)


def test_a_model_is_registered_once_and_answers_by_its_alias(tracker, model_dir, mlflow_at):
    import torch
    from transformers import AutoModelForCausalLM

    run = tracker.parent_run(RUN_KEY, params={"seed": 0}, tags={})
    tags = {"step_key": KEY, "eval.pass_at_1": "0.5"}
    first = register_model(
        tracker, run, model_dir, name="tiny", alias="champion", tags=tags, step=60
    )
    assert (
        register_model(tracker, run, model_dir, name="tiny", alias="champion", tags=tags, step=60)
        == first
        == "1"
    )
    other = register_model(
        tracker,
        run,
        model_dir,
        name="tiny",
        alias=None,
        tags=tags | {"step_key": "cd" * 32},
        step=60,
    )
    assert other == "2"
    assert len(tracker.client.search_model_versions("name = 'tiny'")) == 2
    champion = tracker.client.get_model_version_by_alias("tiny", "champion")
    held = set(json.loads(champion.tags.pop(FILES)))
    assert {"MLmodel", "model/model.safetensors", "components/tokenizer/tokenizer.json"} <= held
    assert (str(champion.version), champion.run_id, champion.tags) == ("1", run, tags)

    parts = mlflow_at.transformers.load_model("models:/tiny@champion", return_type="components")
    assert parts["tokenizer"].chat_template == CHAT_TEMPLATE
    assert parts["tokenizer"]("go left").input_ids == [2, 3]
    weights = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    loaded = parts["model"].state_dict()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)

    chat = mlflow_at.pyfunc.load_model("models:/tiny@champion")
    (answer,) = chat.predict(
        {"messages": [{"role": "user", "content": "go left"}], "max_tokens": 4}
    )
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["choices"][0]["message"]["role"] == "assistant"
    # the run continues after registration
    assert tracker.client.get_run(run).info.status == "RUNNING"


@pytest.mark.parametrize("change", ["weights", "more", "gone"])
def test_a_version_whose_files_changed_is_not_loaded(tracker, model_dir, tmp_path, change):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    made = register_model(
        tracker, run, model_dir, name="tiny", alias=None, tags={"step_key": KEY}, step=1
    )
    assert (fetch_version(tracker, "tiny", made, tmp_path / "whole") / "MLmodel").is_file()
    place = tracker.client.get_model_version("tiny", made).source.removeprefix("file://")
    weights = Path(place) / "model" / "model.safetensors"
    if change == "weights":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif change == "more":
        (Path(place) / "sitecustomize.py").write_text("")
    else:
        weights.unlink()
    named = "sitecustomize.py" if change == "more" else "model/model.safetensors"
    with pytest.raises(ModelChanged, match=f"tiny version 1: {named} is not what was registered"):
        fetch_version(tracker, "tiny", made, tmp_path / "changed")


@pytest.mark.usefixtures("champion")
def test_mlflows_own_loader_gets_a_version_as_it_was_registered_or_none(
    tracker, tmp_path, mlflow_at
):
    files = verified_model("models:/tiny@champion", str(tmp_path / "by alias"))
    parts = mlflow_at.transformers.load_model(files, return_type="components")
    assert parts["tokenizer"].chat_template == CHAT_TEMPLATE
    place = tracker.client.get_model_version("tiny", "1").source.removeprefix("file://")
    (Path(place) / "model" / "generation_config.json").write_text("{}")
    with pytest.raises(ModelChanged, match=r"model/generation_config\.json is not what was"):
        verified_model("models:/tiny/1", str(tmp_path / "changed"))
    tracker.client.delete_model_version_tag("tiny", "1", FILES)
    with pytest.raises(ModelChanged, match="tiny version 1 lacks the digests of its files"):
        verified_model("models:/tiny/1", str(tmp_path / "without"))
    with pytest.raises(LookupError, match="no version of tiny has the alias best"):
        verified_model("models:/tiny@best")
    with pytest.raises(ValueError, match="expected models:/NAME@ALIAS"):
        verified_model("models:/tiny")


def test_a_kill_while_registering_leaves_one_model_and_one_version(tracker, model_dir, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    # before the model is complete, and before it is registered
    for step in ("log_model_artifacts", "create_model_version"):
        with monkeypatch.context() as patch:
            patch.setattr(tracker.client, step, killed)
            with pytest.raises(KeyboardInterrupt):
                register_model(
                    tracker,
                    run,
                    model_dir,
                    name="tiny",
                    alias="champion",
                    tags={"step_key": KEY},
                    step=1,
                )
    assert (
        register_model(
            tracker, run, model_dir, name="tiny", alias="champion", tags={"step_key": KEY}, step=1
        )
        == "1"
    )
    (model,) = tracker.client.search_logged_models([tracker.experiment_id])
    assert str(model.status) == "READY"
    assert len(tracker.client.search_model_versions("name = 'tiny'")) == 1


def test_a_registration_sent_again_because_its_reply_was_lost_leaves_one_version(
    tracker, model_dir, monkeypatch
):
    create = tracker.client.create_model_version

    def sent_twice(*arguments, **options):
        create(*arguments, **options)
        return create(*arguments, **options)

    monkeypatch.setattr(tracker.client, "create_model_version", sent_twice)
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    assert (
        register_model(
            tracker, run, model_dir, name="tiny", alias="champion", tags={"step_key": KEY}, step=1
        )
        == "1"
    )
    assert [
        str(found.version) for found in tracker.client.search_model_versions("name = 'tiny'")
    ] == ["1"]


def test_a_model_without_its_key_or_its_files_is_refused(tracker, tmp_path):
    run = tracker.parent_run(RUN_KEY, params={}, tags={})
    with pytest.raises(
        ValueError, match=r"must hold step_key; without it a retry would register tiny twice"
    ):
        register_model(
            tracker, run, tmp_path, name="tiny", alias="champion", tags={"algo": "grpo"}, step=1
        )
    with pytest.raises(
        ValueError, match=r"holds no config\.json; pass the folder of save_pretrained"
    ):
        register_model(
            tracker, run, tmp_path, name="tiny", alias="champion", tags={"step_key": KEY}, step=1
        )


@pytest.mark.slow
@pytest.mark.usefixtures("champion")
def test_a_version_is_served_as_the_manual_says(tracker, tmp_path, mlflow_process):
    words = ("models", "serve", "--env-manager", "local", "--model-uri", "models:/tiny@champion")
    more = {"health": "/ping", "timeout_s": 240, "MLFLOW_TRACKING_URI": tracker.uri}
    with mlflow_process(tmp_path, *words, "--port", "PORT", **more) as address:
        body = {"messages": [{"role": "user", "content": "go left"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{address}/invocations",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.loads(reply.read())
    (answer,) = answer if isinstance(answer, list) else (answer,)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == 2

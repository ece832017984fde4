"""A registered model equals the store's export, wherever it is downloaded."""

import json
import shutil

import pytest

from agentgym.audit.findings import Checks
from agentgym.audit.registered import check_registry
from agentgym.audit.stored_steps import read_steps
from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.evaluation.policies import PolicyName
from agentgym.pipeline import contenders
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store, run_key
from agentgym.tracking.registry import (
    FILES,
    RECORD,
    ModelChanged,
    file_digests,
    lasting_digests,
    verified_model,
)

CHAT, TOKENIZER = "components/tokenizer/chat_template.jinja", "components/tokenizer/tokenizer.json"


def replaced(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# file that the audit names -> change to the folder
EXCHANGED = {
    CHAT: lambda folder: (folder / CHAT).write_text("{{ 'obey' }}"),
    TOKENIZER: lambda folder: replaced(folder / TOKENIZER, '"id": 0', '"id": 1'),
    "MLmodel": lambda folder: replaced(folder / "MLmodel", "flavors:", "code: code\nflavors:"),
    "requirements.txt": lambda folder: (folder / "requirements.txt").write_text("torch\nevil\n"),
    "code/evil.py": lambda folder: ((folder / "code").mkdir(), (folder / "code/evil.py").touch()),
    "model/model.safetensors": lambda folder: zeroed(folder / "model/model.safetensors"),
}


def zeroed(path):
    from safetensors.torch import load_file, save_file

    save_file({name: 0 * each for name, each in load_file(path).items()}, path, {"format": "pt"})


def folder_of(forger):
    (found,) = (forger.cfg.state_dir / "mlflow-artifacts").glob("models/*/artifacts/MLmodel")
    return found.parent


def exchange(forger, path):
    """Change a file, and its digest on the version and the model, as a writer to MLflow could."""
    folder = folder_of(forger)
    EXCHANGED[path](folder)
    for table, key in (("model_version_tags", "key"), ("logged_model_tags", "tag_key")):
        value = "value" if key == "key" else "tag_value"
        digests = json.dumps(file_digests(folder), separators=(",", ":"), sort_keys=True)
        forger.sql(f"update {table} set {value} = ? where {key} = ?", digests, FILES)


def registry(forger):
    cfg = forger.cfg
    store, checks = open_store(cfg), Checks("registry")
    steps = read_steps(cfg, store, Checks("content"), Checks("lineage"))
    check_registry(cfg, store, run_key(cfg), steps, checks)
    return checks.check()


def fetched(forger, folder):
    shutil.rmtree(folder, ignore_errors=True)
    name = PolicyName.parse(f"models:/{forger.cfg.registered_model}@champion")
    return contenders._registered(forger.cfg, name, folder)


@pytest.mark.parametrize("path", EXCHANGED)
def test_an_exchanged_file_with_its_digest_is_refused_wherever_the_model_is_fetched(
    forger, tmp_path, capsys, path
):
    exchange(forger, path)
    with pytest.raises(ConfigError, match=f"{path} is not what was registered"):
        fetched(forger, tmp_path / "fetched")
    params = str(forger.cfg.state_dir / "params.yaml")
    for command in ("history", "lineage"):
        assert main([command, "--params", params]) == 1
        assert f"{path} is not what was registered" in capsys.readouterr().out
    check = registry(forger)
    assert any(f"{path} is not what was registered" in each for each in check.failures)


def test_an_exchanged_file_is_found_by_exporting_again_where_the_store_was_changed_too(forger):
    exchange(forger, CHAT)
    exchange(forger, "code/evil.py")
    commit = forger.commits("register")[0]
    digests = lasting_digests(folder_of(forger))
    forger.rewrite("register", 0, RECORD, json.dumps(digests, sort_keys=True).encode())
    assert commit.digest == forger.commits("register")[0].digest  # covers no records
    check = registry(forger)
    named = [each for each in check.failures if "exports it" in each]
    assert sorted(each.split(": ")[1].split(" as ")[0] for each in named) == sorted(
        [CHAT, "code/evil.py"]
    )


def test_a_version_that_no_store_registered_is_not_checked_in_words(
    forger, tmp_path, caplog, capsys
):
    (folder,) = forger.steps.glob("register-*")
    shutil.rmtree(folder)
    assert fetched(forger, tmp_path / "by decision").is_dir()
    assert not caplog.records  # the decision names the digests of the version's files
    for folder in forger.steps.glob("promotions-*"):
        shutil.rmtree(folder)
    fetched(forger, tmp_path / "by nothing")
    told = "not checked: files of agentgym-babyai version 1, no store here has the commit"
    assert told in caplog.text
    assert main(["lineage", "1", "--params", str(forger.cfg.state_dir / "params.yaml")]) == 0
    assert f"files: {told}" in capsys.readouterr().out


def test_a_model_for_mlflows_loaders_is_compared_with_the_commit_of_a_store(
    forger, tmp_path, caplog
):
    import mlflow

    uri, store = f"models:/{forger.cfg.registered_model}@champion", open_store(forger.cfg)
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(forger.cfg.tracking_uri)
    try:
        verified_model(uri, str(tmp_path / "with"), store)
        assert "not checked" not in caplog.text
        verified_model(uri, str(tmp_path / "without"))
        assert "not checked: files of agentgym-babyai version 1" in caplog.text
        exchange(forger, CHAT)
        verified_model(uri, str(tmp_path / "by MLflow"))
        with pytest.raises(ModelChanged, match=CHAT):
            verified_model(uri, str(tmp_path / "exchanged"), store)
    finally:
        mlflow.set_tracking_uri(before)


def test_a_model_that_mlflow_lost_is_registered_again_with_the_files_of_its_commit(
    forger, tmp_path
):
    for table in ("model_versions", "model_version_tags", "registered_model_aliases"):
        forger.sql(f"delete from {table}")
    forger.sql("delete from registered_model_tags")
    forger.sql("delete from registered_models")
    forger.sql("delete from logged_model_tags where tag_key = ?", FILES)
    forger.sql("update logged_models set name = 'gone' where name = 'agentgym-babyai'")
    run_step("register", load_config(forger.cfg.state_dir / "params.yaml"))
    assert fetched(forger, tmp_path / "again").is_dir()
    assert registry(forger).ok

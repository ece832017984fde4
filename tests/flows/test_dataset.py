"""Messages of the whole command if its dataset is not available as pinned."""

import json

import pytest


@pytest.mark.slow
def test_a_dataset_that_cannot_be_pulled_fails_the_flow_in_words(fresh):
    for path in (fresh.folder / "data/dvc-remote").rglob("*"):
        if path.is_file():
            path.unlink()
    ended = fresh.pipeline()
    assert ended.returncode == 1
    last, page = ended.stderr.strip().splitlines()[-2:]
    assert page.endswith("docs/reference/errors-services.md#dvcerror")
    assert last.startswith(
        "failed: DvcError: dataset not pulled: `dvc pull data/AgentGym-RL-Data-ID.dvc` failed (1): "
    )
    assert last.endswith(
        "holds the files (`dvc push` on a machine that has them), or set data.path to a folder of"
        " your own"
    )


@pytest.mark.slow
def test_a_dataset_that_is_not_the_pinned_one_fails_the_flow_in_words(fresh):
    assert fresh.run("dvc", "pull").returncode == 0
    train = fresh.folder / "data/AgentGym-RL-Data-ID/train/babyai_train.json"
    train.write_text(json.dumps(json.loads(train.read_text())[1:]))
    ended = fresh.pipeline()
    assert ended.returncode == 2
    assert (
        ended.stderr.strip()
        .splitlines()[-2]
        .startswith("error: digest mismatch: data/AgentGym-RL-Data-ID is not what ")
    )
    assert not (fresh.folder / ".agentgym/store").exists()
    # restored as the message suggests, the dataset lets the first step finish
    assert fresh.run("dvc", "checkout", "--force", "data/AgentGym-RL-Data-ID.dvc").returncode == 0
    assert fresh.run("dvc", "repro", "prepare").returncode == 0

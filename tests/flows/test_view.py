"""The viewer on a run that the pipeline made."""

import shutil

import pytest

from agentgym.audit.episodes import replay_sample
from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import read_steps
from agentgym.config import load_config
from agentgym.store.runstore import folder_name
from agentgym.viewer.index import FILES, Address
from agentgym.viewer.viewer import FOLDER, Viewer


@pytest.fixture
def viewer(finished, monkeypatch):
    """Yield a viewer of the run with its index built."""
    monkeypatch.chdir(finished.folder)
    opened = Viewer.open(load_config("params.yaml"))
    opened.refresh()
    yield opened
    opened.close()
    shutil.rmtree(opened.cfg.state_dir / FOLDER)


@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_replays_agree_with_the_record_on_every_episode_that_an_audit_draws(viewer, count):
    """32 episodes per step are the default of `agentgym audit`."""
    steps = read_steps(viewer.cfg, viewer.store, Checks("content"), Checks("lineage"))
    sample = replay_sample(steps, count, seed=29)
    said = {}
    for record, commit, episode in sample:
        held = {**commit.records, **commit.blobs}
        file = next(number for number, name in enumerate(FILES) if name in held)
        line = record.episodes[commit.seq].index(episode)
        address = Address(folder_name(record.name, record.key), commit.seq, file, line)
        found = viewer.bodies.find(address)
        assert found.episode == episode
        replay = viewer.replays.now(found)
        drawn = sum(bool(shot.media_type) for shot in replay.shots)
        said[str(address)] = (replay.agrees, drawn, replay.said)
    assert {record.name for record, _, _ in sample} >= {"stage-1", "stage-3", "evaluate-stage-3"}
    assert len(said) == len(sample) > 3 * count
    differ = {place: told for place, told in said.items() if not told[0]}
    assert differ == {}
    assert all(drawn > 1 for _, drawn, _ in said.values())

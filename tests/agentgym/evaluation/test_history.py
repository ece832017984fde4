"""One decision history per registry for all stores, and decisions among comparable models only."""

import shutil
from dataclasses import replace

import pytest

from agentgym.config import load_config
from agentgym.console import doctor
from agentgym.evaluation.gate import judged_again
from agentgym.evaluation.history import History, HistoryElsewhere, Home
from agentgym.evaluation.question import Question
from agentgym.evaluation.registry import HOME, Promotions
from agentgym.store.runstore import StorePlace, store_at
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.registry import model_tags
from tests.registries import RULES, Registry

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def tracker(tmp_path_factory, empty_ledger):
    folder = tmp_path_factory.mktemp("ledger")
    (folder / "mlflow.db").write_bytes(empty_ledger.read_bytes())
    return Tracker(f"sqlite:///{folder / 'mlflow.db'}", "tests", folder / "artifacts")


@pytest.fixture
def registry(tracker, tmp_path, request):
    return Registry(tracker, tmp_path, request.node.name[:80])


BABYAI = Question(
    {"babyai": {"options": {"levels": ["GoToObj"]}, "dialect": "native"}},
    {"babyai": "1" * 64},
    {"evaluation.max_turns": 12},
)
COUNTING = Question(
    {"counting": {"options": {}, "dialect": "native"}},
    {"counting": "2" * 64},
    {"evaluation.max_turns": 12},
)


def test_a_second_environment_keeps_its_hands_off_the_champion(registry):
    """Hold a second environment's model under the same name, without an evaluation."""
    registry.consider(registry.version(100, BABYAI))
    candidate = registry.version(190, COUNTING)

    def played(champion):
        raise AssertionError("two models of different things were asked one question")

    entry = registry.promotions().consider(candidate, RULES, played, "asked")
    assert (entry.verdict, entry.moved) == ("HOLD", False)
    assert entry.why == (
        "they cannot be compared: its environments are counting, the champion's babyai; give it a"
        " name of its own (registry.model_name; empty: by its environments)"
    )
    assert (registry.holder, judged_again(entry.decision)) == ("1", dict(entry.decision))
    better = registry.version(190, BABYAI)
    assert registry.consider(better).moved


def test_a_command_with_another_environments_parameters_moves_nothing(registry):
    for solved in (100, 190):
        candidate = registry.version(solved, BABYAI)
        entry = registry.promotions().consider(
            candidate,
            RULES,
            lambda champion, candidate=candidate: registry.evidence(candidate, champion),
            candidate.checkpoint,
            question=COUNTING,
        )
    assert "its environments are counting" in entry.why
    assert registry.holder == "1"


def test_a_protocol_of_the_gate_asks_models_of_one_environment_whatever_their_own_was(registry):
    rules = RULES.model_copy(update={"protocol": "agentgym-rl"})
    registry.consider(registry.version(100, BABYAI), rules=rules)
    longer = registry.version(150, replace(BABYAI, protocol={"evaluation.max_turns": 20}))
    assert registry.consider(longer, rules=rules).moved
    assert not registry.consider(registry.version(190, COUNTING), rules=rules).moved


def test_a_champion_of_an_earlier_version_is_known_by_its_runs_environments(registry):
    registry.consider(registry.version(100, environment="babyai"))
    entry = registry.consider(registry.version(190, environment="counting"))
    assert "its environments are counting, the champion's babyai" in entry.why
    assert registry.consider(registry.version(190, environment="babyai")).moved


def test_two_stores_on_one_mlflow_decide_in_one_history(registry, tmp_path):
    """Judge the second store's model by the first store's champion, and extend that history."""
    registry.consider(registry.version(100))
    first = registry.store
    registry.store = registry.store_in(tmp_path / "second")
    assert registry.consider(registry.version(60)).verdict == "REJECT"
    assert registry.consider(registry.version(140)).moved
    assert registry.holder == "3"
    assert [entry.number for entry in registry.entries] == [1, 2, 3]
    assert History(registry.store, registry.name, "champion").entries() == []
    registry.store = first
    assert registry.consider(registry.version(120)).before.number == "3"
    assert registry.promotions().standing(registry.entries).drift == ""


@pytest.mark.parametrize("bucket_first", [False, True])
def test_a_folder_and_a_bucket_on_one_mlflow_decide_in_one_history(registry, s3_uri, bucket_first):
    stores = [registry.store, StorePlace(s3_uri, 30.0).open()]
    first, second = reversed(stores) if bucket_first else stores
    registry.store = first
    registry.consider(registry.version(100))
    registry.store = second
    assert registry.consider(registry.version(140)).moved
    assert [entry.number for entry in registry.entries] == [1, 2]
    assert History(second, registry.name, "champion").entries() == []
    registry.store = first
    assert registry.promotions().standing(registry.entries).drift == ""


def test_the_history_of_a_store_that_was_moved_or_copied_goes_on_in_it(registry, tmp_path):
    registry.consider(registry.version(100))
    (tmp_path / "store").rename(tmp_path / "moved")
    registry.store = registry.store_in(tmp_path / "moved")
    assert registry.consider(registry.version(140)).moved
    home = Home.from_json(model_tags(registry.tracker, registry.name)[f"{HOME}champion"])
    assert (home.store, len(registry.entries)) == (str(tmp_path / "moved"), 2)


def test_a_copy_of_store_and_registry_decides_in_its_own_history(empty_ledger, tmp_path):
    """Never write into the store that was copied."""
    for name in ("first", "copy"):
        folder = tmp_path / name
        if name == "copy":
            shutil.copytree(tmp_path / "first", folder)
        else:
            folder.mkdir()
            (folder / "mlflow.db").write_bytes(empty_ledger.read_bytes())
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        tracker = Tracker(uri, "tests", folder / "artifacts")
        found = Promotions(store_at(folder / "store", lease_ttl_s=30.0), tracker, "own", "best")
        if name == "first":
            Registry(tracker, folder, "own")
            version = tracker.client.create_model_version("own", "somewhere").version
            found.force(found.version(str(version)), "a test")
        shutil.rmtree(tmp_path / "copy/store/steps", ignore_errors=True)
        assert found.history.store.root == str(folder / "store")


def test_a_history_on_another_machine_is_named_and_nothing_is_decided_beside_it(registry, tmp_path):
    registry.consider(registry.version(100))
    told = Home.from_json(model_tags(registry.tracker, registry.name)[f"{HOME}champion"])
    away = replace(told, store="/home/ann/store", host="annes-laptop")
    set_tag = registry.tracker.client.set_registered_model_tag
    set_tag(registry.name, f"{HOME}champion", away.to_json())
    registry.store = registry.store_in(tmp_path / "second")
    candidate = registry.version(140)
    with pytest.raises(HistoryElsewhere, match="is in /home/ann/store on annes-laptop, which can"):
        registry.consider(candidate)
    entry = registry.promotions().undecided(candidate, "why")
    assert (entry.moved, entry.before.number, registry.holder) == (False, "1", "1")
    # decisions continue where the store is
    registry.store = registry.store_in(tmp_path / "store")
    assert registry.consider(candidate).moved


def test_where_the_store_of_a_history_was_deleted_another_begins_with_the_champion(
    registry, tmp_path
):
    registry.consider(registry.version(100))
    shutil.rmtree(tmp_path / "store")
    registry.store = registry.store_in(tmp_path / "second")
    assert registry.consider(registry.version(140)).moved
    assert [entry.kind for entry in registry.entries] == ["found", "judged"]


def test_a_history_of_an_earlier_release_goes_on(registry):
    """Continue a history whose registry has no tag with its location."""
    registry.consider(registry.version(100))
    registry.tracker.client.delete_registered_model_tag(registry.name, f"{HOME}champion")
    assert registry.consider(registry.version(140)).before.number == "1"
    assert f"{HOME}champion" in model_tags(registry.tracker, registry.name)


def taken_by_another_environment(registry):
    """Move the alias to another environment, as an earlier release did. Return both versions."""
    first, other = registry.version(100, BABYAI), registry.version(190, COUNTING)
    registry.consider(first)
    promotions = registry.promotions()
    promotions._unlike = lambda *_: ""
    entry = promotions.consider(
        other, RULES, lambda champion: registry.evidence(other, champion), "an earlier release"
    )
    assert entry.moved
    return first, other


def test_an_alias_that_another_environment_took_is_found_until_it_is_given_back(registry):
    taken_by_another_environment(registry)
    said = registry.promotions().misplaced()
    assert "decision 2 took it from version 1 and gave it to version 2, though its environ" in said
    assert f"`agentgym rollback --to 1 --set 'registry.model_name={registry.name}'`" in said
    registry.promotions().roll_back("1", "it is no model of babyai")
    assert registry.promotions().misplaced() == ""
    registry.consider(registry.version(150, BABYAI))
    assert registry.promotions().misplaced() == ""


def findings(registry, tmp_path, *overrides):
    """Return the findings of `agentgym doctor` on this registered model."""
    own = [f"tracking.uri={registry.tracker.uri}", f"store.path={tmp_path / 'store'}"]
    found = doctor._aliases(load_config(overrides=[*own, *overrides]))
    return [each for each in found if registry.name in each.text]


def test_doctor_finds_an_alias_that_another_environment_took(registry, tmp_path):
    taken_by_another_environment(registry)
    (finding,) = findings(registry, tmp_path)
    assert (finding.ok, finding.needed, finding.state) == (False, True, "WRONG")
    assert finding.text.startswith(f"{registry.name}@champion: decision 2 took it from version 1")
    registry.promotions().roll_back("1", "it is no model of babyai")
    assert findings(registry, tmp_path) == []


def test_doctor_finds_a_first_champion_of_another_environment_than_its_name(registry, tmp_path):
    """Register a plug-in's first run under the name that was a constant then."""
    registry.consider(registry.version(100, COUNTING))
    (finding,) = findings(registry, tmp_path, f"registry.model_name={registry.name}")
    assert f"{registry.name}@champion is version 1 of counting, and this run's" in finding.text

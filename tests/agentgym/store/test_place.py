"""A store's location can be sent to another process and opened there."""

import pickle

import pytest

from agentgym.models.tensorfiles import Snapshot
from agentgym.store.runstore import StoreNotHere, StorePlace, store_at


def test_a_place_travels_and_opens_the_same_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = store_at("store", lease_ttl_s=7.0)
    with store.open("prepare", "a" * 64):  # creates the folder
        place = pickle.loads(pickle.dumps(StorePlace.of(store)))
    monkeypatch.chdir("/")  # like a process in another folder
    assert place == StorePlace(str(tmp_path / "store"), 7.0)
    assert place.visit("prepare", "a" * 64).root == str(tmp_path / "store")
    with pytest.raises(StoreNotHere):  # another store in the same folder
        place.visit("prepare", "b" * 64)


def test_a_folder_that_another_machine_does_not_see_is_named(tmp_path):
    place = StorePlace(str(tmp_path / "elsewhere"), 7.0)
    with pytest.raises(StoreNotHere, match=r"elsewhere is not on .*; every node of the cluster"):
        Snapshot({}).write(place, "stage-1", "a" * 64)
    assert place.open().heads() == []  # opening may create a store


def test_a_store_on_s3_is_a_place_too():
    place = StorePlace("s3://bucket/prefix", 7.0)
    assert StorePlace.of(place.visit("prepare", "a" * 64)) == place

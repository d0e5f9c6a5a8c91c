"""A network and a store that go wrong, between this package and a real S3 server."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import discovery, events
from lightning_ft._inspection.consolidate import consolidate
from lightning_ft._saving.read_back import read_back_file
from lightning_ft._stores.errors import is_transient
from lightning_ft.discovery import last_good, select, verify
from lightning_ft.errors import ConfigurationError, CorruptCheckpointError, SaveError, StorageError
from lightning_ft.manifest import FileRecord
from lightning_ft.storage import Storage
from tests.stores.chaos import Rule
from tests.stores.checkpoints import MIB, no_waits, save, small_parts, uploads
from tests.stores.fixtures import Place

__all__ = ["no_waits", "small_parts"]

pytestmark = [pytest.mark.needs("s3fs", "weed"), pytest.mark.usefixtures("no_waits", "small_parts")]

LARGE = 12 * MIB
"""Three parts."""


def good(place: Place, path: str) -> bool:
    return verify(path, storage_options=place.direct()).problem is None


def forever(action: str, **where: Any) -> Rule:
    return Rule(action, **where)


PASSING = [
    ("part-503", Rule("status", method="PUT", query="partNumber=2", times=5)),
    ("part-500", Rule("status", method="PUT", query="partNumber=2", times=2, status=500, code="InternalError")),
    ("part-reset", Rule("reset", method="PUT", query="partNumber=1", times=2)),
    ("part-answer-lost", Rule("drop_response", method="PUT", query="partNumber=3", times=1)),
    ("part-corrupted", Rule("corrupt_upload", method="PUT", query="partNumber=2", times=1, offset=1000)),
    ("create-reset", Rule("reset", method="POST", query="uploads", times=1)),
    ("complete-503", Rule("status", method="POST", query="uploadId", times=3)),
    ("complete-reset", Rule("reset", method="POST", query="uploadId", times=2)),
    ("complete-answer-lost", Rule("drop_response", method="POST", query="uploadId", times=1)),
    ("look-503", Rule("status", method="GET", path="step=", times=3)),
    ("look-truncated", Rule("truncate", method="GET", path="step=", times=2)),
]


@pytest.mark.parametrize("rule", [rule for _, rule in PASSING], ids=[name for name, _ in PASSING])
def test_g3_a_fault_that_passes_does_not_fail_a_save(chaos: Place, rule: Rule) -> None:
    storage = Storage(chaos.options)
    storage.probe(chaos.url)
    chaos.rules.append(Rule(**{**vars(rule), "seen": 0, "hits": 0}))
    path = save(storage, chaos.url, size_bytes=LARGE)
    assert chaos.rules[0].hits == rule.times
    assert good(chaos, path)
    assert uploads(storage, chaos.url) == []


def test_weights_alone_are_uploaded_as_carefully(chaos: Place, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    weight = torch.arange(LARGE // 4, dtype=torch.float32)
    torch.save({"state_dict": {"weight": weight}}, tmp_path / "x.ckpt")
    storage, url = Storage(chaos.options), f"{chaos.url}/x.safetensors"
    chaos.rules.append(Rule("status", method="PUT", query="partNumber=2", times=2))
    consolidate(storage, str(tmp_path / "x.ckpt"), url, lambda _: None)
    assert chaos.rules[0].hits == 2
    chaos.rules[:] = [forever("status", method="PUT", query="partNumber=2")]
    with pytest.raises(StorageError, match="x.safetensors"):  # noqa: RUF043
        consolidate(storage, str(tmp_path / "x.ckpt"), url, lambda _: None)
    assert uploads(storage, chaos.url) == []
    chaos.rules.clear()
    with storage.open_read(url) as file:
        assert torch.equal(safetensors.load(file.read())["weight"], weight)


def test_a_small_one_whose_answer_is_lost_is_recognised(chaos: Place) -> None:
    """The client's own repetition finds the object, and is refused: it is this very checkpoint."""
    storage = Storage(chaos.options)
    storage.probe(chaos.url)
    chaos.rules.append(Rule("drop_response", method="PUT", path="step=", times=1))
    path = save(storage, chaos.url)
    assert [method for method, where in chaos.log if "00001" in where and method == "PUT"] == ["PUT", "PUT"]
    assert good(chaos, path)


@pytest.mark.parametrize("size_bytes", [100, LARGE], ids=["one-request", "parts"])
def test_a_save_made_again_finds_what_it_had_published(chaos: Place, size_bytes: int) -> None:
    """The answer to the commit, and every look after it, are lost: the next try at the same save is not refused."""
    storage = Storage(chaos.options)
    storage.probe(chaos.url)
    generation = "1" * 32
    commit = Rule("drop_response", method="PUT|POST", path="step=", query="^$|uploadId=[^&]*$|x-id=PutObject|^uploadId")
    chaos.rules += [commit, Rule("reset", method="GET", path="step=")]
    with pytest.raises(StorageError) as caught:
        save(storage, chaos.url, size_bytes=size_bytes, generation=generation)
    assert caught.value.transient
    chaos.rules.clear()
    path = save(storage, chaos.url, size_bytes=size_bytes, generation=generation)
    assert good(chaos, path)
    with pytest.raises(SaveError, match="another checkpoint of this name"):
        save(storage, chaos.url, size_bytes=size_bytes, generation="2" * 32)


LASTING = [
    ("create", Rule("status", method="POST", query="uploads")),
    ("part", Rule("status", method="PUT", query="partNumber=2")),
    ("part-reset", Rule("reset", method="PUT", query="partNumber=2")),
    ("part-corrupted", Rule("corrupt_upload", method="PUT", query="partNumber=2", offset=1000)),
    ("complete", Rule("status", method="POST", query="uploadId")),
]


@pytest.mark.parametrize("rule", [rule for _, rule in LASTING], ids=[name for name, _ in LASTING])
def test_g3_a_fault_that_lasts_fails_the_save_and_leaves_nothing(chaos: Place, rule: Rule) -> None:
    storage = Storage(chaos.options)
    save(storage, chaos.url, 1)
    chaos.rules.append(Rule(**{**vars(rule), "seen": 0, "hits": 0}))
    drawn = random.getstate()
    with pytest.raises(StorageError) as caught:
        save(storage, chaos.url, 2, size_bytes=LARGE)
    assert is_transient(caught.value)
    assert chaos.rules[0].hits <= 25  # the repetitions of the clients do not multiply beyond that
    # They wait for random times, and the generator belongs to the training.
    assert random.getstate() == drawn
    chaos.rules.clear()
    assert uploads(storage, chaos.url) == []
    assert storage.listdir(chaos.url) == ["step=00000001.ckpt"]


CALLS: dict[str, Callable[[Storage, Place], object]] = {
    "upload": lambda storage, place: save(storage, place.url, 2, size_bytes=LARGE),
    "list": lambda storage, place: storage.listdir(place.url),
    "tail": lambda storage, place: storage.read_manifest(f"{place.url}/step=00000001.ckpt"),
    "read": lambda storage, place: storage.read_digest(f"{place.url}/step=00000001.ckpt", 50),
    "exists": lambda storage, place: storage.exists(f"{place.url}/step=00000001.ckpt"),
    "remove": lambda storage, place: storage.remove(f"{place.url}/step=00000001.ckpt"),
    "leftovers": lambda storage, place: storage.remove_leftovers(place.url),
    "probe": lambda storage, place: storage.probe(place.url),
    "select": lambda storage, place: select(place.url, storage_options=place.options),
    "verify": lambda storage, place: verify(f"{place.url}/step=00000001.ckpt", storage_options=place.options),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_never_answers_is_given_up(chaos: Place, call: str) -> None:
    """Every call has an end, and says so; nothing that says "no" or "damaged" is made of silence."""
    save(Storage(chaos.options), chaos.url)  # and the client is there, which takes longer than what follows
    chaos.options["deadline_secs"] = 0.5
    storage = Storage(chaos.options)
    chaos.rules.append(Rule("blackhole"))
    with pytest.raises((StorageError, ConfigurationError), match=r"no answer from the store within 0\.5 s"):
        CALLS[call](storage, chaos)
    chaos.rules.clear()
    assert patient(chaos).exists(f"{chaos.url}/step=00000001.ckpt")


def patient(place: Place) -> Storage:
    """By the same client, with the time that an answer may take."""
    return Storage({**place.options, "deadline_secs": 60})


def test_a_black_hole_in_the_commit_leaves_the_older_ones(chaos: Place) -> None:
    save(Storage(chaos.options), chaos.url, 1)
    chaos.options["deadline_secs"] = 3
    chaos.rules.append(Rule("blackhole", method="POST", query="uploadId"))
    with pytest.raises(StorageError, match="no answer"):
        save(Storage(chaos.options), chaos.url, 2, size_bytes=LARGE)
    storage = patient(chaos)
    assert storage.listdir(chaos.url) == ["step=00000001.ckpt"]
    assert uploads(storage, chaos.url) == []


@pytest.mark.parametrize("deadline", [0, -1, True, "60", None])
def test_a_deadline_that_is_none_is_refused(deadline: Any) -> None:
    with pytest.raises(ConfigurationError, match="deadline_secs="):
        Storage({"deadline_secs": deadline})


# -- reading -----------------------------------------------------------------------------------------------------


def test_a_bit_that_flips_once_on_the_way_is_read_again(chaos: Place) -> None:
    storage = Storage(chaos.options)
    path = save(storage, chaos.url, size_bytes=9 * MIB)
    reads = {"method": "GET", "path": "step=", "times": 1, "offset": 100}
    chaos.rules.append(Rule("corrupt", after=1, **reads))  # the first is the manifest
    assert verify(path, storage_options=chaos.options).problem is None
    assert chaos.rules[0].hits == 1
    chaos.rules[:] = [Rule("corrupt", after=2, **reads)]  # the end is looked for in two requests
    file, found = storage.open_verified(path)
    with file:
        assert found is not None
        assert file.read(4) == b"PK\x03\x04"
    assert chaos.rules[0].hits == 1
    # A rank's file of a directory, read back before the commit.
    whole = FileRecord(9 * MIB, storage.read_digest(path, 9 * MIB))
    storage.write_object(f"{chaos.url}/part", memoryview(_bytes_of(storage, path)[: 9 * MIB]))
    chaos.rules[:] = [Rule("corrupt", method="GET", path="part", times=1, offset=100)]
    read_back_file(storage, chaos.url, "part", whole, "full")
    assert chaos.rules[0].hits == 1
    chaos.rules[:] = [Rule("corrupt", method="GET", path="part", offset=100)]
    with pytest.raises(CorruptCheckpointError, match="does not match what was written"):
        read_back_file(storage, chaos.url, "part", whole, "full")


def _bytes_of(storage: Storage, path: str) -> bytes:
    with storage.open_read(path) as file:
        return file.read()


@pytest.mark.parametrize("room", [True, False], ids=["copy", "no-room-for-a-copy"])
def test_bits_that_flip_every_time_are_found_before_anything_is_used(
    chaos: Place, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Also those that flip only after everything was compared, where it has to be fetched a second time."""
    if not room:
        monkeypatch.setattr("lightning_ft._stores.verified_file.SPARE_BYTES", 1 << 60)
    storage = Storage(chaos.options)
    path = save(storage, chaos.url, size_bytes=50 * MIB)
    chaos.rules.append(Rule("corrupt", method="GET", path="step=", after=3, offset=100))
    assert verify(path, storage_options=chaos.options).problem == (
        "data is damaged: its digest does not match the manifest"
    )
    with pytest.raises(CorruptCheckpointError, match="digest does not match"):
        storage.open_verified(path)
    if room:
        return
    chaos.rules.clear()
    file, _ = storage.open_verified(path)
    with file:
        chaos.rules.append(Rule("corrupt", method="GET", path="step=", offset=100))
        with pytest.raises(CorruptCheckpointError, match="arrived damaged"):
            file.read()


def test_an_answer_that_ends_early_every_time_says_nothing_of_the_file(chaos: Place) -> None:
    """So "last" does not fall back to an older checkpoint because of it."""
    storage = Storage(chaos.options)
    save(storage, chaos.url, 1)
    save(storage, chaos.url, 2, size_bytes=9 * MIB)
    chaos.rules.append(Rule("truncate", method="GET", path="00002"))
    for ask in (last_good, discovery.list_checkpoints):
        with pytest.raises(StorageError) as caught:
            ask(chaos.url, storage_options=chaos.options)
        assert caught.value.transient


def test_a_forbidden_store_says_so_at_once(chaos: Place) -> None:
    storage = Storage(chaos.options)
    chaos.rules.append(Rule("status", status=403, code="AccessDenied"))
    for ask in (storage.listdir, storage.read_manifest, storage.open_read):
        seen = len(chaos.log)
        with pytest.raises(PermissionError) as caught:
            ask(f"{chaos.url}/step=00000001.ckpt")
        assert not is_transient(caught.value)
        assert len(chaos.log) == seen + 1
    with pytest.raises(ConfigurationError, match="cannot be written"):
        storage.probe(chaos.url)


# -- listings ----------------------------------------------------------------------------------------------------


def test_an_old_listing_loses_nothing(chaos: Place) -> None:
    """The newest is not seen, an older one is resumed, and comes to the same step: what is there stays there."""
    storage = Storage(chaos.options)
    storage.probe(chaos.url)
    save(storage, chaos.url, 1)
    newest = save(storage, chaos.url, 2)
    chaos.rules.append(Rule("missing", method="GET", query="list-type", pattern="00002"))
    found = last_good(chaos.url, storage_options=chaos.options)
    assert found is not None
    assert found.name == "step=00000001.ckpt"
    before = storage.read_manifest(newest)
    with pytest.raises(SaveError, match="another checkpoint of this name"):
        save(storage, chaos.url, 2, start=2)
    assert storage.read_manifest(newest) == before


def test_what_is_listed_after_its_removal_is_passed_over(chaos: Place) -> None:
    storage = Storage(chaos.options)
    save(storage, chaos.url, 1)
    removed = save(storage, chaos.url, 3)
    assert len(storage.listdir(chaos.url)) == 2
    storage.remove(removed)
    chaos.rules.append(Rule("stale", method="GET", query="list-type"))
    seen: list[str] = []
    stop = events.observe(lambda event: seen.append(event.path) if isinstance(event, events.PassedOver) else None)
    try:
        found = last_good(chaos.url, storage_options=chaos.options)
    finally:
        stop()
    assert found is not None
    assert found.name == "step=00000001.ckpt"
    assert seen == [removed]


def test_our_own_listing_is_never_a_remembered_one(chaos: Place) -> None:
    storage, other = Storage(chaos.options), Storage(chaos.direct())
    assert storage.listdir(chaos.url) == []
    path = save(other, chaos.url)
    assert storage.listdir(chaos.url) == ["step=00000001.ckpt"]
    assert storage.exists(path)
    other.remove(path)
    assert storage.listdir(chaos.url) == []
    assert not storage.exists(path)


def test_waiting_is_bounded_by_the_deadline_and_not_by_the_repetitions(
    chaos: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is busy for ever: the deadline ends it while the clients still repeat."""
    tries = 1_000_000
    monkeypatch.setattr("lightning_ft._stores.calls.TRIES", tries)
    Storage(chaos.options).listdir(chaos.url)
    chaos.options["deadline_secs"] = 2
    storage = Storage(chaos.options)
    chaos.rules.append(Rule("status"))
    with pytest.raises(StorageError, match="no answer from the store within 2 s"):
        storage.listdir(chaos.url)
    assert 1 < chaos.rules[0].hits < tries

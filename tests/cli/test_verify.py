"""`lightning-ft verify`: every flipped bit is found, and the part that it lies in is named."""

from __future__ import annotations

import random
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft._inspection import check as _check
from lightning_ft._inspection.check import check, check_all
from lightning_ft.storage import Storage
from tests.cli.conftest import Answer, cut, data_offset, flip, step
from tests.trainer import runs
from tests.unit._archives import maker

Ft = Callable[..., Answer]
MIB = 1 << 20


def test_everything_is_good(ft: Ft, run_dir: Path) -> None:
    answer = ft("verify", run_dir, "--json")
    assert answer.code == 0
    assert answer.json["counts"] == {"good": 5}
    assert all(set(f) == FILE_KEYS for f in answer.json["files"])
    assert "5 files: 5 good" in ft("verify", run_dir).out


FILE_KEYS = {"path", "name", "state", "bad", "problem", "size_bytes", "damages"}


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ("data/0", "tensor state_dict.layer.weight"),
        ("data/1", "tensor state_dict.layer.bias"),
        ("data.pkl", "data.pkl"),
        ("version", "version"),
    ],
)
def test_the_broken_part_is_named(ft: Ft, run_dir: Path, record: str, part: str) -> None:
    path = step(run_dir, 4)
    offset = data_offset(path, record)
    flip(path, offset)
    answer = ft("verify", path, step(run_dir, 6), "--json")
    assert answer.code == 1
    broken, good = answer.json["files"]
    assert (broken["state"], good["state"]) == ("broken", "good")
    [damage] = broken["damages"]
    assert (damage["part"], damage["record"], damage["offset"]) == (part, record, offset)
    text = ft("verify", path).out
    assert f"{path} is damaged in:\n  {part} ({record}, " in text
    assert f" at byte {offset}): its data do not match their checksum" in text


def test_several_parts(ft: Ft, run_dir: Path) -> None:
    path = step(run_dir, 4)
    for record in ("data/0", "data/1"):
        flip(path, data_offset(path, record))
    damages = ft("verify", path, "--json").json["files"][0]["damages"]
    assert [d["record"] for d in damages] == ["data/0", "data/1"]


def test_damage_beside_the_data(ft: Ft, run_dir: Path) -> None:
    path = step(run_dir, 4)
    flip(path, data_offset(path, "data/0") - 1)  # the gap before it
    [damage] = ft("verify", path, "--json").json["files"][0]["damages"]
    assert damage["part"] == "between the records"
    path = step(run_dir, 6)
    flip(path, path.stat().st_size - 5)
    [damage] = ft("verify", path, "--json").json["files"][0]["damages"]
    assert damage["part"] == "manifest"
    path = step(run_dir, 8)
    cut(path)
    answer = ft("verify", path, "--json")
    assert answer.code == 1
    [damage] = answer.json["files"][0]["damages"]
    assert damage["part"] == "end of the file"


def test_a_damaged_checksum_is_told_from_damaged_data(ft: Ft, run_dir: Path) -> None:
    path = step(run_dir, 4)
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        at = archive.start_dir
    entry = data.index(b"archive/data/0", at) - 46
    flip(path, entry + 16)
    [damage] = ft("verify", path, "--json").json["files"][0]["damages"]
    assert "its data are as they were written" in damage["reason"]


def test_every_flipped_bit_is_found_and_placed(run_dir: Path, tmp_path: Path) -> None:
    source = step(run_dir, 4).read_bytes()
    place = tmp_path / "flipped.ckpt"
    with zipfile.ZipFile(step(run_dir, 4)) as archive:
        sizes = {i.filename.partition("/")[2]: i.file_size for i in archive.infolist()}
    records = {name: data_offset(step(run_dir, 4), name) for name in sizes}
    drawn = random.Random(1)
    # The archive's own offsets are at its end, and say what is sought and read before any digest is compared.
    at = 8 * source.rindex(b"PK\x06\x06")
    for bit in [*(drawn.randrange(8 * len(source)) for _ in range(1000)), *range(at, at + 8 * (56 + 20))]:
        data = bytearray(source)
        data[bit // 8] ^= 1 << bit % 8
        place.write_bytes(data)
        finding = check(Storage(), str(place))
        assert finding.state == "broken", bit
        inside = [name for name, begins in records.items() if begins <= bit // 8 < begins + sizes[name]]
        if inside:
            assert [damage.record for damage in finding.damages] == inside
        else:
            assert finding.damages


def test_an_offset_below_zero_is_damage_and_no_fault_of_the_storage(run_dir: Path, tmp_path: Path) -> None:
    source = step(run_dir, 4).read_bytes()
    begin = source.rindex(b"PK\x06\x06")  # says where the table of contents is
    for bit in range(8 * begin, 8 * (begin + 76)):
        data = bytearray(source)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped.ckpt").write_bytes(data)
        assert check(Storage(), str(tmp_path / "flipped.ckpt")).state == "broken", bit


def test_foreign_files_by_their_own_checksums(ft: Ft, plain_dir: Path) -> None:
    answer = ft("verify", plain_dir, "--json")
    assert answer.code == 0
    assert answer.json["counts"] == {"foreign": 2}
    path = plain_dir / "users.ckpt"
    flip(path, data_offset(path, "data/0"))
    answer = ft("verify", path, "--json")
    assert answer.code == 1
    assert answer.json["files"][0]["damages"][0]["part"] == "tensor state_dict.layer.weight"


def test_files_written_without_checksums(ft: Ft, plain_dir: Path, tmp_path: Path) -> None:
    path = plain_dir / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(checkpoint, path)
    finally:
        torch.serialization.set_crc32_options(True)
    answer = ft("verify", path, "--json")
    assert answer.code == 0
    assert answer.json["files"][0]["problem"] == "written without any checksum"
    assert ft("show", path).code == 0
    assert ft("diff", path, plain_dir / "users.ckpt", "--only", "state_dict").code == 0
    # It is no reason to refuse it at a restart.
    assert ft("list", plain_dir, "--verify", "full", "--json").json["last"]["path"] == str(path)
    out = tmp_path / "out.ckpt"
    assert ft("consolidate", path, out).code == 0  # from now on it has a digest
    flip(out, data_offset(out, "data/0"))
    answer = ft("verify", out, "--json")
    assert answer.code == 1
    assert "without checksums" in answer.json["files"][0]["damages"][0]["reason"]


def test_only_what_a_storage_raises_is_its_fault(run_dir: Path) -> None:
    class ClientError(Exception):
        """Of a client of an object store."""

    class Failing(Storage):
        error: Exception

        def open_read(self, path: str) -> Any:
            raise self.error

    storage = Failing()
    for storage.error in (OSError(5, "Input/output error"), ClientError("503"), TimeoutError()):
        assert check(storage, str(step(run_dir, 4))).state == "unreadable"
    storage.error = TypeError("a bug")
    with pytest.raises(TypeError):
        check(storage, str(step(run_dir, 4)))


def test_size_only(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 4), data_offset(step(run_dir, 4), "data/0"))
    answer = ft("verify", run_dir, "--depth", "size", "--json")
    assert answer.code == 0
    assert answer.json["counts"] == {"unverified": 5}


def test_nothing_there(ft: Ft, tmp_path: Path) -> None:
    assert ft("verify", tmp_path / "x.ckpt").code == 3
    assert ft("verify", tmp_path).code == 3
    assert "Traceback" not in ft("verify", tmp_path, "--json").err


@pytest.mark.parametrize("jobs", [1, 3])
def test_several_at_once_in_the_order_asked(ft: Ft, run_dir: Path, jobs: int) -> None:
    paths = [str(step(run_dir, number)) for number in (8, 2, 6, 4)]
    answer = ft("verify", *paths, "--jobs", jobs, "--json")
    assert [file["path"] for file in answer.json["files"]] == paths


def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        fs = fsspec.filesystem("memory")
        flip(step(run_dir, 2), data_offset(step(run_dir, 2), "data/0"))
        for number in (2, 4):
            fs.pipe_file(f"{url}/{number}.ckpt", step(run_dir, number).read_bytes())
        answer = ft("verify", url, "--json")
        assert answer.code == 1
        assert [file["state"] for file in answer.json["files"]] == ["broken", "good"]
        assert answer.json["files"][0]["damages"][0]["part"] == "tensor state_dict.layer.weight"


def large(path: Path, size_bytes: int) -> None:
    """A checkpoint of ours with one tensor."""
    torch.save({"state_dict": {"weight": torch.zeros(size_bytes // 4)}}, path.with_suffix(".plain"))
    with Storage().open_attempt(str(path)) as attempt:
        attempt.write(path.with_suffix(".plain").read_bytes())
        attempt.commit(maker())
    path.with_suffix(".plain").unlink()


@pytest.mark.parametrize("damaged", [False, True])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, damaged: bool) -> None:
    peaks = []
    for size_bytes in (4 * MIB, 32 * MIB):
        path = tmp_path / f"{size_bytes}.ckpt"
        large(path, size_bytes)
        if damaged:
            flip(path, size_bytes // 2)
        counted: list[int] = []
        tracemalloc.start()
        finding = check(Storage(), str(path), "full", counted.append)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert finding.state == ("broken" if damaged else "good")
        assert max(counted) <= MIB
        assert sum(counted) >= size_bytes
    assert peaks[1] < 4 * MIB
    assert peaks[1] < peaks[0] + MIB


def test_given_up_it_does_not_wait_for_a_storage_that_hangs(run_dir: Path) -> None:
    hangs, asked = threading.Event(), threading.Event()

    class Hanging(Storage):
        def open_read(self, path: str) -> Any:
            if path.endswith("step=00000004.ckpt"):
                asked.set()
                assert hangs.wait(60)
            return super().open_read(path)

    threads = set(threading.enumerate())
    findings = check_all(Hanging(), [str(step(run_dir, 2)), str(step(run_dir, 4))], jobs=2)
    assert next(findings).state == "good"
    assert asked.wait(60)
    findings.close()  # type: ignore[attr-defined]  # returns: that is the test
    hangs.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir / "last.ckpt"
    path.write_bytes(step(run_dir, 4).read_bytes())
    judge = _check._judge

    def replaced_meanwhile(*args: Any) -> Any:
        (run_dir / "new").write_bytes(step(run_dir, 6).read_bytes())
        (run_dir / "new").rename(path)
        return judge(*args)

    monkeypatch.setattr(_check, "_judge", replaced_meanwhile)
    finding = check(Storage(), str(path))
    assert finding.state == "good"
    assert finding.manifest is not None
    assert finding.manifest.step == 4


def test_a_link_to_nothing_is_no_checkpoint_that_was_rotated_away(ft: Ft, run_dir: Path) -> None:
    (run_dir / "last.ckpt").symlink_to(run_dir / "unmounted")
    for args in (["verify", run_dir], ["list", run_dir]):
        answer = ft(*args)
        assert answer.code == 1
        assert f"a link to {run_dir / 'unmounted'}, which is not there" in answer.out

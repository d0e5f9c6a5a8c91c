from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from _archives import archive, info, manifest, save

from lightning_ft.discovery import verify
from lightning_ft.errors import CheckpointError, CorruptCheckpointError, ManifestError, UnsupportedFormatError
from lightning_ft.manifest import (
    EOCD_BYTES,
    MAX_COMMENT_BYTES,
    Manifest,
    from_json,
    parse_tail,
    seal,
    to_json,
)

FULL = manifest(
    parent="b" * 32,
    versions={"torch": "2.6"},
    topology={"world_size": 2, "strategy": "ddp"},
    metrics={"stage_secs": 0.5},
    reason='quo"te é\n',
)


def sealed(value: Manifest | None = None, data: bytes = b"weights", **fields: Any) -> bytes:
    """The bytes of a whole file."""
    plain = archive(data)
    body = plain[:-EOCD_BYTES]
    digest = xxhash.xxh3_128_hexdigest(body)
    value = replace(value or manifest(), size_bytes=len(body), digest=digest, **fields)
    return body + seal(plain[-EOCD_BYTES:], value)


def reseal(file: bytes, text: str, encoding: str = "utf-8") -> bytes:
    """`file` with the JSON `text` as its manifest under a seal that holds, as a newer version writes it."""
    body = file[: zipfile_end(file)]
    blank = (text[:-1] + ',"seal":"' + "0" * 32 + '"}').encode(encoding)
    unsealed = file[len(body) : len(body) + 20] + len(blank).to_bytes(2, "little") + blank
    return body + unsealed[:-34] + xxhash.xxh3_128_hexdigest(unsealed).encode() + b'"}'


def zipfile_end(file: bytes) -> int:
    return file.rindex(b"PK\x05\x06")


def parse(file: bytes) -> Manifest | None:
    return parse_tail(file[-(EOCD_BYTES + MAX_COMMENT_BYTES) :], len(file), "/run/a.ckpt")


@pytest.mark.parametrize("value", [manifest(), FULL], ids=["plain", "full"])
def test_json_comes_back(value: Manifest) -> None:
    assert from_json(to_json(value)) == value
    assert to_json(value).isascii()


@pytest.mark.parametrize("data", [b"", b"weights", b"x" * 200_000], ids=["empty", "small", "larger-than-tail"])
def test_a_sealed_file_says_what_was_sealed(data: bytes) -> None:
    found = parse(sealed(FULL, data))
    assert found is not None
    assert replace(found, size_bytes=0, digest="") == FULL


def test_the_file_is_an_ordinary_zip_and_the_comment_valid_json() -> None:
    file = sealed(FULL)
    with zipfile.ZipFile(io.BytesIO(file)) as opened:
        assert opened.testzip() is None
        assert opened.read("archive/data.pkl") == b"weights"
        keys = list(json.loads(opened.comment))
    assert keys[0] == "lightning_ft"
    assert keys[-1] == "seal"
    assert "generation" in keys


def test_every_flipped_bit_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "step=00000010.ckpt"
    save(str(path))
    file = path.read_bytes()
    assert len(file) < 1500
    assert verify(str(path)).problem is None
    undetected = []
    for bit in range(8 * len(file)):
        damaged = bytearray(file)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        if verify(str(path)).problem is None:
            undetected.append(bit)
    assert undetected == []


def test_every_truncation_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "step=00000010.ckpt"
    save(str(path))
    file = path.read_bytes()
    undetected = []
    for length in range(len(file)):
        path.write_bytes(file[:length])
        if verify(str(path), "listed").problem is None:
            undetected.append(length)
    assert undetected == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: b"", "truncated or not a zip archive"),
        (lambda file: b"PK\x05\x06", "truncated or not a zip archive"),
        (lambda file: b"not a zip archive, but longer than a record", "truncated or not a zip archive"),
        (lambda file: file[:-1], "truncated or not a zip archive"),
        (lambda file: file + b"x", "truncated or not a zip archive"),
        (lambda file: file[10:], "bytes of data"),
        (lambda file: b"0123456789" + file, "bytes of data"),
        (lambda file: file.replace(b'"step":10', b'"step":11'), "seal does not match"),
        (lambda file: file[:-34] + b"0" * 32 + b'"}', "seal does not match"),
        (lambda file: file.replace(b'"seal"', b'"sea1"'), "does not end in a seal"),
        (lambda file: file.replace(b'"lightning_ft"', b'"lightning_fx"'), "seal does not match"),
    ],
    ids=[
        "empty", "bare-signature", "no-zip", "one-byte-less", "one-byte-more", "head-cut", "head-added",
        "step-changed", "seal-zeroed", "seal-renamed", "magic-renamed",
    ],
)  # fmt: skip
def test_damage_is_named(change: Any, reason: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=reason) as caught:
        parse(change(sealed()))
    assert caught.value.path == "/run/a.ckpt"


@pytest.mark.parametrize("comment", [b"", b"hello", b"{}", b'{"seal": 1}', b"PK\x05\x06" + b"\0" * 30])
def test_somebody_elses_archive_is_foreign(comment: bytes) -> None:
    buffer = io.BytesIO(archive())
    with zipfile.ZipFile(buffer, "a") as file:
        file.comment = comment
    assert parse(buffer.getvalue()) is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format": 2}, UnsupportedFormatError, "format 2 is newer"),
        ({"requires": ["rays", "delta"]}, UnsupportedFormatError, "rays, delta"),
        ({"step": None}, ManifestError, "lacks step"),
        ({"step": None, "digest": None}, ManifestError, "lacks step, digest"),
        ({"step": "ten"}, ManifestError, "step is not an integer"),
        ({"step": True}, ManifestError, "step is not an integer"),
        ({"metrics": []}, ManifestError, "metrics is not an object"),
        ({"topology": {"x": json.loads("[" * 400 + "]" * 400)}}, ManifestError, "nested deeper than 50"),
        ({"requires": "rays"}, ManifestError, "requires is not a list"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_intact_manifests_that_are_refused(change: dict[str, Any], error: type[CheckpointError], message: str) -> None:
    values = json.loads(to_json(manifest()))
    for name, value in change.items():
        if value is None:
            del values[name]
        else:
            values[name] = value
    with pytest.raises(error, match=message):
        parse(reseal(sealed(), json.dumps(values)))


def test_a_newer_format_is_not_believed_without_its_seal() -> None:
    with pytest.raises(CorruptCheckpointError):
        parse(sealed().replace(b'"format":1', b'"format":2'))


def test_unknown_keys_are_ignored_and_optional_ones_may_lack() -> None:
    values = json.loads(to_json(manifest()))
    for name in ("parent", "versions", "topology", "metrics", "requires"):
        del values[name]
    values["colour"] = "blue"
    assert from_json(json.dumps(values)) == manifest()


@pytest.mark.parametrize("more", ['"x":NaN', '"x":1e999', '"x":' + "[" * 30_000 + "]" * 30_000, '"x":"\xff"'])
def test_what_is_sealed_and_no_json_is_malformed(more: str) -> None:
    values = to_json(manifest())[:-1]
    with pytest.raises(ManifestError, match="not valid JSON"):
        parse(reseal(sealed(), f"{values},{more}}}", "latin-1"))


def test_a_later_version_need_not_write_ascii() -> None:
    values = {**json.loads(to_json(manifest())), "format": 2, "host": "Zürich"}
    with pytest.raises(UnsupportedFormatError, match="format 2 is newer"):
        parse(reseal(sealed(), json.dumps(values, ensure_ascii=False)))


@pytest.mark.parametrize("text", ["", "{", "[]", "1"])
def test_what_is_no_json_object(text: str) -> None:
    with pytest.raises(ManifestError):
        from_json(text)


def test_a_metric_that_is_not_finite_does_not_fail_a_save() -> None:
    value = manifest(metrics={"loss": float("nan"), "secs": 1.0})
    assert from_json(to_json(value)).metrics == {"secs": 1.0}


@pytest.mark.parametrize(
    ("eocd", "value", "message"),
    [
        (archive()[-EOCD_BYTES:-1], manifest(), "end-of-archive"),
        (b"x" * EOCD_BYTES, manifest(), "end-of-archive"),
        (archive()[-EOCD_BYTES:-2] + b"\1\0", manifest(), "end-of-archive"),
        (archive()[-EOCD_BYTES:], manifest(versions={"x": "y" * 70_000}), "65535"),
        (archive()[-EOCD_BYTES:], manifest(topology={"x": object()}), "JSON"),
    ],
    ids=["short", "no-record", "has-comment", "too-long", "no-json"],
)
def test_what_cannot_be_sealed(eocd: bytes, value: Manifest, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        seal(eocd, value)


def test_the_longest_comment_fits() -> None:
    room = MAX_COMMENT_BYTES - len(seal(archive()[-EOCD_BYTES:], manifest(versions={"x": ""}))) + EOCD_BYTES
    file = sealed(versions={"x": "y" * (room - 100)})
    assert parse(file) is not None


def test_order_is_start_then_batch_then_step() -> None:
    infos = [
        info("/e", start=2, batch=1, step=1),
        info("/d", start=1, batch=9, step=5),
        info("/c", start=1, batch=9, step=4),
        info("/b", start=1, batch=8, step=6),
        info("/a", problem="truncated"),
    ]
    assert sorted(infos, key=lambda item: item.order, reverse=True) == infos

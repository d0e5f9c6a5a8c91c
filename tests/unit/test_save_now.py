"""The file that asks for a save."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_ft._preemption import save_now as _save_now
from lightning_ft._preemption.save_now import SaveNow


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0  # a look every second
        return self.now


def test_it_is_found_asked_for_once_and_gone_when_the_save_is_durable(tmp_path: Path) -> None:
    save_now = SaveNow([str(tmp_path)], Clock())
    assert not any(save_now.look() for _ in range(9))
    (tmp_path / "SAVE_NOW").touch()
    assert sum(save_now.look() for _ in range(4)) > 0
    save_now.asked(7)
    assert not any(save_now.look() for _ in range(9))
    save_now.saved(6)
    assert (tmp_path / "SAVE_NOW").exists()
    save_now.saved(7)
    assert not (tmp_path / "SAVE_NOW").exists()
    assert not any(save_now.look() for _ in range(9))


def test_touched_again_before_it_is_removed_it_asks_again(tmp_path: Path) -> None:
    file, save_now = tmp_path / "SAVE_NOW", SaveNow([str(tmp_path)], Clock())
    file.touch()
    assert save_now.look()
    save_now.asked(7)
    os.utime(file, ns=(1, 1))
    save_now.saved(8)
    assert file.exists()
    assert any(save_now.look() for _ in range(9))


def test_what_cannot_be_removed_asks_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else's file in a directory that only its owner may change; here a directory, which root keeps, too."""
    file, save_now = tmp_path / "SAVE_NOW", SaveNow([str(tmp_path)], Clock())
    file.mkdir()
    assert save_now.look()
    save_now.asked(7)
    save_now.saved(7)
    assert "cannot be removed" in caplog.text
    assert not any(save_now.look() for _ in range(9))
    os.utime(file, ns=(1, 1))
    assert any(save_now.look() for _ in range(9))


def test_a_failed_save_is_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "SAVE_NOW").touch()
    save_now = SaveNow([str(tmp_path)], Clock())
    assert save_now.look()
    save_now.asked(7)
    save_now.failed()
    assert any(save_now.look() for _ in range(9))


def test_it_looks_every_three_seconds_and_never_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(_save_now, "_made_at", lambda path: looked.append(path))
    save_now = SaveNow(["s3://bucket/run", str(tmp_path)], Clock())
    for _ in range(9):
        save_now.look()
    assert looked == [str(tmp_path / "SAVE_NOW")] * 3


def test_a_file_that_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "SAVE_NOW").touch()
    save_now = SaveNow([str(tmp_path)], Clock())
    assert save_now.look()
    save_now.asked(7)

    def refuse(path: str) -> None:
        raise PermissionError(13, "not yours", path)

    monkeypatch.setattr(os, "unlink", refuse)
    save_now.saved(7)
    assert "cannot be removed" in caplog.text

"""Our lines in a terminal begin with our name, and go where the user's logging takes them."""

from __future__ import annotations

import logging

import pytest

from lightning_ft._fit import console


def test_warnings_have_the_name_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's own
    console.install()
    console.install()
    logging.getLogger("lightning_ft._divergence.rollback").warning("in batch %d", 26)
    logging.getLogger("lightning_ft._divergence.rollback").info("not asked for")
    assert capsys.readouterr().err == "lightning_ft: in batch 26\n"


@pytest.mark.parametrize("name", ["", "lightning_ft"])
def test_whoever_takes_them_has_them_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    console.install()
    taken: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: taken.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    logging.getLogger("lightning_ft._divergence.rollback").warning("in batch 26")
    assert (taken, capsys.readouterr().err) == (["in batch 26"], "")

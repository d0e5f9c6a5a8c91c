"""What is said of a restart never keeps it from going on."""

from __future__ import annotations

from lightning_ft._restart import resumption
from lightning_ft.storage import Storage


class StoreError(Exception):
    """As clients of stores raise them: derived from nothing that we know."""


def test_event_files_that_cannot_be_read_tell_nothing() -> None:
    class Unreachable(Storage):
        def listdir(self, dirpath: str) -> list[str]:
            raise StoreError("503")

    assert resumption.last_step("store://run", Unreachable()) is None


def test_a_clock_that_is_behind_makes_no_negative_age() -> None:
    assert resumption.of_start(2, "0123456789", "runs/1/a.ckpt", -3.0).endswith(", saved 0 s ago")

"""What is said of a restart never keeps it from going on."""

from __future__ import annotations

from lightning_ft._restart import resumption
from lightning_ft.storage import Storage


class StoreError(Exception):
    """As clients of stores raise them: derived from nothing that we know."""


def test_an_age_that_cannot_be_read_is_not_known() -> None:
    class Unreachable(Storage):
        def read_manifest(self, path: str) -> tuple[None, int]:
            raise StoreError("503")

    assert resumption.age_secs("store://run/step=00000001.ckpt", Unreachable()) is None

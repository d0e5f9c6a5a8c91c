"""What one rank knows of another before there is a session: it ends as in one, and the others hear of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ft import exit_codes
from lightning_ft._ranks.before_session import Early
from lightning_ft._ranks.dist import everywhere
from lightning_ft.errors import PeerLostError, RankFailure
from tests import ranks
from tests.ranks import Rank

pytestmark = pytest.mark.distributed

HEARS_WITHIN_SECS = 20


def end(rank: Rank) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=rank.number, world_size=rank.world_size)
    seen: dict[str, Any] = {}

    early = Early()
    failed = OSError("no such store") if rank.number == 0 else RankFailure(0, "OSError: no such store")
    raised = early.failed(everywhere(failed))
    seen["everywhere"] = type(raised).__name__, getattr(raised, "code", 1)
    early.close()

    early = Early()
    if rank.number == 0:
        with pytest.raises(PeerLostError) as absent:
            early.meet(timedelta(seconds=0))
        seen["raises"] = early.failed(absent.value) is absent.value
        rank.tell("given up")
        rank.wait_for("heard")
    else:
        rank.wait_for("given up")
        early.begin()
        peers: Any = early._peers
        peers._heard.wait(HEARS_WITHIN_SECS)
        seen["heard"] = str(peers.lost)
        rank.tell("heard")
    early.close()
    return seen


def test_what_is_known_of_another_rank(tmp_path: Path) -> None:
    first, late = ranks.values(end, tmp_path)
    assert first == {"everywhere": ("OSError", 1), "raises": True}
    assert late["everywhere"] == ("PeerLostError", exit_codes.PEER_LOST)
    assert "rank 0 failed: it has given this rank up: it has not been set up" in late["heard"]

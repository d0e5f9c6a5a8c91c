"""The watcher's process: looks at the page of its rank, hears of the other ranks' watchers, and ends a rank that hangs.

It ends with the process that it watches, however that ends, and when it is released.
"""

from __future__ import annotations

import array
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_ft._watcher.limits import Limits, Overdue, Vigil
from lightning_ft._watcher.page import Page, Phase, Seen
from lightning_ft._watcher.peers import Connection, connect
from lightning_ft._watcher.process import IGNORED, RELEASE, Watched, workers_of
from lightning_ft._watcher.report import Status, arranged, verdict, where

STILL_SECS = 2.0
"""So long rank 0's watcher waits for how long the other ranks have not gone on."""
ANSWER_SECS = 5.0
"""So long a rank that hangs waits for what the other ranks' watchers have to say."""
GRACE_SECS = 60.0
"""So long a save that is being written, on any rank, is waited for."""
QUIET_SECS = 10.0
"""And no longer once nothing of it was written for so long: what hangs may keep the writer from going on."""
STACKS_SECS = 2.0
LEAVE_SECS = 3.0
LEFT_SECS = 3 * LEAVE_SECS
"""So long rank 0's waits for the others. A rank that has not left within `LEAVE_SECS` is killed, which may take as long
again; the rest is for the message of it."""
WORKERS_SECS = 10.0
"""Workers of a data loader look for their parent every five seconds."""
SAY_SECS = 5.0
ENDING_SECS = 0.5


class Watcher:
    """One rank's.

    Args:
        order: What `start` has passed on: `pid`, `page_fd`, `control_fd`, `stacks_fd`, `stacks_signal`, `exit_fd`,
            `exit_code`, `limits`.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._watched = Watched(order["pid"], order["stacks_fd"], order["stacks_signal"], order["exit_fd"])
        self._page = Page(order["page_fd"])
        self._limits = Limits(**order["limits"])
        self._exit_code: int = order["exit_code"]
        self._vigil = Vigil(self._limits, time.monotonic(), self._page.look())
        self._control = socket.socket(fileno=order["control_fd"])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        if self._watched.fd is not None:
            self._selector.register(self._watched.fd, selectors.EVENT_READ)
        self._released = False
        self._rank = 0
        self._world_size = 1
        self._token = ""
        self._all_met = False
        self._absent: set[int] = set()  # of those that this one waits for before all have met
        self._listener: socket.socket | None = None
        self._connections: list[Connection] = []
        self._moved_at = time.monotonic()
        self._last: Seen = self._page.look()
        self._waits_until = 0.0
        # What was heard of other watchers.
        self._overdue: dict[int, float] = {}  # the limits of those that ask whether they are to wait on
        self._still: dict[int, float] = {}
        self._may_wait: bool | None = None
        self._statuses: dict[int, Status] = {}
        self._over: set[int] = set()
        self._call: dict[str, Any] | None = None  # a rank hangs: of ``hung`` or ``ask``
        self._told: list[tuple[str, dict[str, Any]]] = []  # to all of them
        self._verdict: str | None = None
        self._unsettled: set[int] = set()
        self._told_to_leave = False
        self._left: set[int | None] = set()

    def run(self) -> None:
        """The training was released, has ended, or was ended."""
        while not self._released and not self._watched.ended:
            self._pump(self._limits.tick_secs)
            if self._call is not None:
                return self._end_all(self._call)
            seen = self._page.look()
            if (seen.phase, seen.progress) != (self._last.phase, self._last.progress):
                self._moved_at = time.monotonic()
            self._last = seen
            overdue = self._vigil.look(time.monotonic(), seen, paused=self._watched.debugged)
            if self._overdue:
                self._answer()
            if overdue is None or time.monotonic() < self._waits_until:
                continue
            if self._waits_rightly(overdue):
                self._waits_until = time.monotonic() + overdue.limit_secs / 10
            elif self._call is None and not self._released and not self._watched.ended:
                return self._end_all(self._called(overdue))
        if self._released:
            self._tell_all("over")
        else:
            self._tell_all("gone", status=self._status().to_message())
        return None

    # -- hearing -------------------------------------------------------------------------------------------------

    def _pump(self, secs: float) -> None:
        """What came within `secs` was heard; returns at the first."""
        for key, _ in self._selector.select(secs):
            if key.fileobj is self._control:
                self._hear_training()
            elif key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, Connection):
                self._hear(key.fileobj)
            else:  # the end of the watched process stays to be read
                self._selector.unregister(key.fileobj)

    def _hear_training(self) -> None:
        try:
            data, ancillary, _, _ = self._control.recvmsg(1 << 16, socket.CMSG_SPACE(4))
        except ConnectionResetError:
            data, ancillary = b"", []
        if data in (b"", RELEASE):
            self._selector.unregister(self._control)
            # Its end alone: the process is ending, or has become another program.
            self._released = data == RELEASE or not self._watched.wait(ENDING_SECS)
            return
        for _, _, content in ancillary:
            self._listener = socket.socket(fileno=array.array("i", content[:4])[0])
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._take_place(json.loads(data))

    def _take_place(self, place: dict[str, Any]) -> None:
        self._rank = place["rank"]
        self._all_met = self._all_met or "absent" not in place
        # Who is absent may have been on its way for long.
        self._absent = set() if self._all_met else set(place["absent"])
        if place.get("token", self._token) == self._token:
            return
        self._token, self._world_size = place["token"], place["world_size"]
        if self._rank != 0:
            zero = connect(place["host"], place["port"], {"rank": self._rank, "token": self._token})
            if zero is None:
                self._say(f"rank {self._rank}: no way to rank 0's watcher at {place['host']}, port {place['port']}")
            else:
                zero.rank = 0
                self._add(zero)

    def _add(self, connection: Connection) -> None:
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # it has gone already
        self._add(Connection(accepted))

    def _hear(self, connection: Connection) -> None:
        for message in connection.receive():
            if connection.rank is None:
                known = hmac.compare_digest(str(message.get("token")), self._token)
                if message.get("kind") != "hello" or not known:
                    connection.open = False
                    break
                connection.rank = int(message["rank"])
                for kind, content in self._told:
                    connection.send(kind, **content)
            else:
                self._take(connection.rank, message)
        if not connection.open:
            self._selector.unregister(connection)
            self._connections.remove(connection)
            connection.close()

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("hung", "ask"):
            self._call = self._call or message
        if kind in ("hung", "status", "gone"):
            status = Status.from_message(message["status"])
            self._statuses[status.rank] = status
            if status.saving:
                self._unsettled.add(rank)
        elif kind == "over":
            self._over.add(rank)
        elif kind == "overdue":
            self._overdue[rank] = message["limit_secs"]
        elif kind == "still?":
            self._tell(rank, "still", secs=self._still_secs())
        elif kind == "still":
            self._still[rank] = message["secs"]
        elif kind == "wait":
            self._may_wait = message["on"]
        elif kind == "settled":
            self._unsettled.discard(rank)
        elif kind == "verdict":
            self._verdict = message["text"]
        elif kind == "leave":
            self._told_to_leave = True
        elif kind == "left":
            self._left.add(rank)

    def _tell_all(self, kind: str, **content: Any) -> None:
        """Those, too, that connect later: while the ranks meet, one may come when the others are ending."""
        self._told.append((kind, content))
        for connection in self._connections:
            connection.send(kind, **content)

    def _tell(self, rank: int, kind: str, **content: Any) -> None:
        for connection in self._connections:
            if connection.rank == rank:
                connection.send(kind, **content)

    # -- waiting for another rank ----------------------------------------------------------------------------------

    def _waits_rightly(self, overdue: Overdue) -> bool:
        """Whether another rank has gone on within the limit: nothing hangs, and this one waits for it."""
        if overdue.alone or not self._connections:
            return False
        if self._listener is not None:
            return self._least_still_secs(overdue.limit_secs) <= overdue.limit_secs
        self._may_wait = None
        self._tell(0, "overdue", limit_secs=overdue.limit_secs)
        self._until(lambda: self._may_wait is not None or self._call is not None, 2 * STILL_SECS)
        return bool(self._may_wait)

    def _answer(self) -> None:
        """Who has asked knows whether it is to wait on. Ranks: 0."""
        asked, self._overdue = self._overdue, {}
        least_secs = self._least_still_secs(min(asked.values()))
        for rank, limit_secs in asked.items():
            self._tell(rank, "wait", on=least_secs <= limit_secs)

    def _least_still_secs(self, enough_secs: float) -> float:
        """How long no rank has gone on; not asked any further once one has within `enough_secs`. Ranks: 0."""
        self._still = {self._rank: self._still_secs()}
        if self._still[self._rank] > enough_secs:
            ranks = [connection.rank for connection in self._connections if connection.rank is not None]
            for rank in ranks:
                self._tell(rank, "still?")
            self._until(
                lambda: min(self._still.values()) <= enough_secs or self._still.keys() >= set(ranks), STILL_SECS
            )
        return min(self._still.values())

    def _still_secs(self) -> float:
        """For how long this rank has not gone on, none if it waits for a save of its own that has its time."""
        seen, secs = self._page.look(), self._vigil.still_secs
        moved = (seen.phase, seen.progress) != (self._last.phase, self._last.progress)  # since the last look
        saves = seen.phase == Phase.SAVE and seen.saving and secs <= self._vigil.limit_secs(Phase.SAVE)
        return 0.0 if moved or saves else secs

    # -- ending --------------------------------------------------------------------------------------------------

    def _called(self, overdue: Overdue) -> dict[str, Any]:
        reason = (
            f"hang: {overdue.what} for {overdue.still_secs:.1f} s on rank {self._rank} (limit "
            f"{overdue.limit_secs:.1f} s); all ranks end with exit code {self._exit_code}, nothing is saved"
        )
        return {"kind": "own", "reason": reason, "in_save": overdue.in_save}

    def _status(self) -> Status:
        seen = self._page.look()
        ended = self._watched.ended
        return Status(
            rank=self._rank,
            host=socket.gethostname(),
            pid=self._watched.pid,
            phase=int(seen.phase),
            steps=seen.steps,
            position=seen.position,
            state="" if ended else str(self._watched.state()),
            still_secs=time.monotonic() - self._moved_at,
            ended=ended,
            saving=seen.saving,
        )

    def _end_all(self, call: dict[str, Any]) -> None:
        """Every rank has said what it does, a save in flight is over, and this rank's process has ended."""
        leads = self._listener is not None or self._world_size == 1 or not self._connections
        content = {"reason": call["reason"], "in_save": call["in_save"]}
        if leads:
            self._tell_all("ask", **content)
        own = self._status()
        stacks = "" if own.halted else self._watched.stacks(STACKS_SECS)
        own = self._statuses[self._rank] = replace(own, where=where(stacks))
        if not leads:
            called = call["kind"] == "own"
            self._tell_all("hung" if called else "status", status=own.to_message(), **(content if called else {}))
        if leads:
            self._until(self._all_are_known, ANSWER_SECS)
            self._verdict = self._judge(call["reason"])
            self._tell_all("verdict", text=self._verdict)
        else:
            self._until(lambda: self._verdict is not None, 2 * ANSWER_SECS)
        self._say(self._verdict or self._judge(call["reason"]))
        self._say(self._stacks_in_words(stacks, own.state))
        if not call["in_save"]:
            self._settle(own, leads)
        if leads:
            self._tell_all("leave")
            # Last of all: what has started the other ranks may end them with rank 0, in its own way.
            self._until(lambda: all(connection.rank in self._left for connection in self._connections), LEFT_SECS)
        self._end()

    def _all_are_known(self) -> bool:
        """Whether of each rank it is known what it does, or that it cannot be; one that was absent may have come."""
        return len(self._statuses.keys() | self._absent | self._over) >= self._world_size

    def _judge(self, reason: str) -> str:
        statuses = list(self._statuses.values())
        if self._world_size > 1 and self._listener is None and not self._connections:
            known = ", ".join(str(status.rank) for status in statuses)
            return verdict(f"{reason}; watchers of other ranks than {known} cannot be reached", statuses, len(statuses))
        absent, over = self._absent - self._statuses.keys(), self._over - self._statuses.keys()
        return verdict(reason, statuses, self._world_size, absent, over)

    def _settle(self, own: Status, leads: bool) -> None:
        """No save is being written, here and, if this one leads, elsewhere; or it took too long."""
        if own.saving and not own.halted:
            self._say(f"rank {self._rank}: a save is being written: waiting for it, {GRACE_SECS:.0f} s at most")
            self._until(self._save_is_over(), GRACE_SECS)
        if leads:
            self._until(lambda: not self._unsettled, GRACE_SECS)
        else:
            self._tell_all("settled")
            self._until(lambda: self._told_to_leave or not self._connections, GRACE_SECS + ANSWER_SECS)

    def _save_is_over(self) -> Callable[[], bool]:
        """Asked again and again: whether there is no save any more to wait for."""
        written, since = -1, 0.0

        def over() -> bool:
            nonlocal written, since
            seen, now = self._page.look(), time.monotonic()
            if seen.save_progress != written:
                written, since = seen.save_progress, now
            return not seen.saving or self._watched.ended or now - since > QUIET_SECS

        return over

    def _until(self, done: Callable[[], bool], secs: float) -> None:
        deadline = time.monotonic() + secs
        while not done() and (left := deadline - time.monotonic()) > 0:
            self._pump(min(left, self._limits.tick_secs))

    def _end(self) -> None:
        if self._watched.ended:
            return
        workers = workers_of(self._watched.pid)
        how = self._watched.end(LEAVE_SECS, self._exit_code)
        self._tell_all("left")
        self._say(f"rank {self._rank} (pid {self._watched.pid}): {how}. Start the same command again")
        deadline = time.monotonic() + WORKERS_SECS
        while any(worker.alive for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        for worker in workers:
            worker.kill()

    def _stacks_in_words(self, stacks: str, state: str) -> str:
        whose = f"rank {self._rank} (pid {self._watched.pid})"
        return (
            f"Python stacks of {whose}:\n{arranged(stacks)}"
            if stacks
            else f"no Python stacks of {whose}: {state or 'it has ended'}"
        )

    def _say(self, text: str) -> None:
        """`text` is on the training's standard error, each line with our name; or nobody takes it."""
        data = "".join(f"lightning_ft: {line}\n" for line in text.splitlines()).encode()
        # Nobody may be reading the other end of a pipe any more, and this must not hang.
        writing = threading.Thread(target=_write, args=(data,), daemon=True)
        writing.start()
        writing.join(SAY_SECS)


def _write(data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(2, view) :]
    except OSError:
        return  # there is nobody to be told


def main() -> None:
    """Watches as the first argument says."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    Watcher(json.loads(sys.argv[1])).run()
    # A thread may still be trying to say something.
    os._exit(0)

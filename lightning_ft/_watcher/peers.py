"""The watchers of all ranks know each other: rank 0's listens, and the others have a connection to it.

Nothing is said on it until a rank is overdue. No process group is involved: that is what hangs. A rank that waits for
another one is overdue, too, though nothing hangs as long as that one goes on: rank 0 alone writes a checkpoint, say. So
it is asked whether any has. Who connects when something was said already, because it has come later, hears that first.

==========  ===========  ====================================================================================
Message     From         Meaning
==========  ===========  ====================================================================================
``hello``   the others   whose watcher this is, and that it belongs here
``gone``    everyone     the process of this rank has ended without a word
``over``    everyone     the fit of this rank is over, and nobody watches it any more
``overdue`` the others   this rank is; has another one gone on within the same limit?
``still?``  rank 0's     for how long has yours not gone on?
``still``   the others   the answer
``wait``    rank 0's     whether another one has, and yours is to wait on
``hung``    the others   this rank hangs; asks rank 0's watcher to ask everybody
``ask``     rank 0's     some rank hangs: say what yours does
``status``  the others   the answer
``verdict`` rank 0's     what is to be printed
``settled`` the others   no save is being written here any more
``leave``   rank 0's     end your rank
``left``    the others   it has ended
==========  ===========  ====================================================================================

Messages are lines of JSON. Who does not know the token of this start is not listened to.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

_MOST_BYTES = 1 << 20
_SEND_SECS = 2.0
_CONNECT_SECS = 5.0


class Connection:
    """Messages to and from one other watcher.

    Attributes:
        rank: Whose; None until it has said so.
        open: Whether it is still there.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(_SEND_SECS)
        # A machine that is gone says nothing: found out within some minutes, while nobody waits for that.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket = connected
        self.rank: int | None = None
        self.open = True
        self._received = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, kind: str, **content: Any) -> None:
        """The message is on its way, or the connection is known to be gone. Blocks on: two seconds at most."""
        line = json.dumps({"kind": kind, **content}) + "\n"
        try:
            self.socket.sendall(line.encode())
        except OSError:
            self.open = False

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come; the connection is not open any more if there will be none."""
        try:
            received = self.socket.recv(1 << 16)
        except OSError:
            received = b""
        if not received or len(self._received) > _MOST_BYTES:
            self.open = False
            return []
        *lines, self._received = (self._received + received).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.open = False  # somebody else's
                return []
            messages.append(message)
        return messages

    def close(self) -> None:
        """The other one will see the end of it."""
        self.open = False
        with contextlib.suppress(OSError):
            self.socket.close()


def listen(host: str) -> socket.socket:
    """A socket on a free port that the other ranks' watchers can reach.

    Args:
        host: By what name or address they know this machine; if that is one of the loopback, nobody else can connect.
    """
    # By its text: on many machines their own name is an address of the loopback, and for others it is not.
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", 0))
    if host == "::1":
        return socket.create_server(("::1", 0), family=socket.AF_INET6)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(host: str, port: int, hello: Mapping[str, Any]) -> Connection | None:
    """A connection to rank 0's watcher, which knows us; None if there is no way to it."""
    try:
        connection = Connection(socket.create_connection((host, port), timeout=_CONNECT_SECS))
    except OSError:
        return None
    connection.send("hello", **hello)
    return connection if connection.open else None

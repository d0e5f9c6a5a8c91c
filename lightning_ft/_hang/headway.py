"""Something that may rightly take long comes a piece further: a file is read, data is fetched again, a save is written.

Who does such a thing says so after each piece, and who wants to tell slow from stuck listens. Without a listener it
costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: tuple[Callable[[], None], ...] = ()


def made() -> None:
    """Every listener has heard of one more piece. Thread: any; the one that does the work."""
    for listener in _listeners:
        listener()


def listen(callback: Callable[[], None]) -> Callable[[], None]:
    """`callback` is called after every piece until the returned function is. Thread: main."""
    global _listeners
    own = [callback]

    def call() -> None:
        own[0]()

    def stop() -> None:
        global _listeners
        _listeners = tuple(listener for listener in _listeners if listener is not call)

    _listeners = (*_listeners, call)
    return stop

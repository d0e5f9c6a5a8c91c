from __future__ import annotations

import dataclasses
import logging

import pytest

from lightning_ft import events


def test_observers_are_called_in_order_and_until_they_stop() -> None:
    seen: list[tuple[str, events.Event]] = []
    stop_a = events.observe(lambda event: seen.append(("a", event)))
    stop_b = events.observe(lambda event: seen.append(("b", event)))
    try:
        first, second = events.Renamed("/x"), events.Deleted("/x")
        events.emit(first)
        stop_a()
        stop_a()
        events.emit(second)
    finally:
        stop_a()
        stop_b()
    events.emit(events.Deleted("/y"))
    assert seen == [("a", first), ("b", first), ("b", second)]


def test_one_callback_registered_twice_is_called_twice() -> None:
    seen: list[events.Event] = []
    stops = [events.observe(seen.append), events.observe(seen.append)]
    events.emit(events.Deleted("/x"))
    stops[0]()
    events.emit(events.Deleted("/y"))
    stops[1]()
    assert [event.path for event in seen] == ["/x", "/x", "/y"]


def test_what_an_observer_raises_reaches_the_emitter() -> None:
    def fail(event: events.Event) -> None:
        raise OSError("injected")

    stop = events.observe(fail)
    try:
        with pytest.raises(OSError, match="injected"):
            events.emit(events.Renamed("/x"))
    finally:
        stop()


def test_an_observer_may_stop_itself_while_called() -> None:
    stops = [events.observe(lambda event: stops[0]())]
    events.emit(events.Renamed("/x"))
    events.emit(events.Renamed("/x"))


def test_one_debug_line_per_event(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="lightning_ft.events"):
        events.emit(events.SaveFailed("/x", 3, "disk full"))
    assert [record.getMessage() for record in caplog.records] == ["SaveFailed(path='/x', step=3, reason='disk full')"]


@pytest.mark.parametrize("cls", events.EVENT_TYPES.values(), ids=lambda cls: cls.__name__)
def test_events_are_frozen_and_begin_with_the_path(cls: type[events.Event]) -> None:
    fields = dataclasses.fields(cls)
    assert fields[0].name == "path"
    event = cls(*(["x"] * len(fields)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.path = "y"  # type: ignore[misc]


def test_every_event_has_a_name_in_the_table() -> None:
    def subclasses(cls: type) -> set[type]:
        return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))

    ours = {cls for cls in subclasses(events.Event) if cls.__module__ == events.__name__}
    assert set(events.EVENT_TYPES.values()) == ours - {events.Event}


def test_kill_points_are_events() -> None:
    assert set(events.KILL_POINTS) <= set(events.EVENT_TYPES)
    assert len(set(events.KILL_POINTS)) == len(events.KILL_POINTS) == 9

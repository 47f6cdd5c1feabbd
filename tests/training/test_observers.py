"""The hub that tells observers of a run's events."""

import inspect

import pytest

from qlora_wgpu.errors import CallbackError
from qlora_wgpu.training import Observer
from qlora_wgpu.training.observers import EVENTS, Events


def tell_all(events):
    for name in EVENTS:
        details = list(inspect.signature(getattr(Observer, name)).parameters)[1:]
        getattr(events, name)(*details)


def test_all_who_subscribe_are_told_everything():
    calls, events = [], Events()

    class Told(Observer):
        def __getattribute__(self, name):
            return lambda *args: calls.append(name)

    for _ in range(2):
        events.subscribe(Told())
    assert len(EVENTS) >= 15
    tell_all(events)
    assert calls == [name for name in EVENTS for _ in range(2)]


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)

    warning = note


class Fails(Notes):
    def step(self, row):
        raise ValueError("no more")

    def close(self):
        self.texts.append("closed")


def test_an_observer_that_fails_is_told_no_more_and_ends_the_run():
    first, fails, events = Notes(), Fails(), Events()
    for each in (first, fails):
        events.subscribe(each)
    events.note("before")
    events.step({"step": 1})
    with pytest.raises(CallbackError, match=r"^Fails\.step failed: ValueError: no more$") as caught:
        events.check()
    assert isinstance(caught.value.__cause__, ValueError)
    events.step({"step": 2})
    events.note("after")
    assert (first.texts, fails.texts) == (["before", "after"], ["before"])
    events.forget_stop()  # the next run begins
    events.check()
    events.note("again")
    assert fails.texts == ["before", "again"]


def test_a_service_that_fails_is_warned_of_once_and_the_run_goes_on():
    notes, fails, sound, events = Notes(), Fails(), Fails(), Events()
    sound.step = lambda row: None
    events.subscribe(notes)
    for each in (fails, sound):
        events.subscribe(each, on_error="drop")
    for _ in range(2):
        events.step({"step": 1})
    events.close()
    events.note("ended")
    events.check()
    assert notes.texts == ["Fails is disabled after an error: no more", "ended"]
    assert "closed" not in fails.texts and sound.texts[-1] == "closed"


def test_whoever_stops_first_says_why():
    one, other, events = Observer(), Observer(), Events()
    for each in (one, other):
        events.subscribe(each)
    assert events.stop_reason is None
    other.stop_run("enough")
    assert events.stop_reason == "enough"
    one.stop_run()
    assert events.stop_reason == "an observer stopped it"
    events.stop_run("mine")
    assert events.stop_reason == "mine"
    events.forget_stop()
    assert events.stop_reason is None


def test_where_nobody_listens_there_are_warnings():
    with pytest.warns(match="mind this"):
        Events.of(None).warning("mind this")
    events = Events()
    assert Events.of(events) is events

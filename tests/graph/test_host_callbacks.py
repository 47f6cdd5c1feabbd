"""What the host moves between launches, and when it waits, on a device that only takes notes."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.graph import host_callbacks
from qlora_wgpu.graph.host_callbacks import OffloadEngine, fetches, transfer_bytes
from qlora_wgpu.graph.offload import OffloadedTensor, WeightStream
from qlora_wgpu.graph.tensor import Storage


class Readback:
    """Read-backs of one source, of which ``most`` may be under way."""

    def __init__(self, device, source, nbytes, most, counts=True):
        self.device, self.source, self.most, self.counts = device, source, most, counts
        self.waiting = []

    @property
    def full(self):
        return len(self.waiting) >= self.most

    def request(self):
        self.device.notes.append(f"ask {self.source}")
        self.waiting.append(self.device.contents.get(self.source, b""))

    def take(self):
        self.device.notes.append(f"take {self.source}")
        return self.waiting.pop(0)


class Device:
    def __init__(self):
        self.notes, self.contents, self.buffers = [], {}, []
        self.memory = self

    def uncounted(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def buffer(self, nbytes, kind, label, bound=True):
        self.buffers.append((nbytes, kind, bound))
        return "fence" if label == "a word behind uploads" else f"buffer {len(self.buffers)}"

    def write(self, buffer, data, begin, read):
        self.notes.append(f"write {buffer} {begin} {data.nbytes}")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(host_callbacks, "Readback", Readback)
    return Device()


def launch(*groups, saves=(), fetched=(), **storages):
    tensors = {group.label: SimpleNamespace(storage=Storage("w", "base", 4, group=group))
               for group in groups}  # fmt: skip
    tensors |= {name: SimpleNamespace(storage=each) for name, each in storages.items()}
    return SimpleNamespace(tensors=tensors, saves=dict(saves), fetches=dict(fetched))


def run(engine, launches):
    """The notes of a run, with the launches that computed between them."""
    notes = engine._device.notes
    notes.clear()
    steps = engine.steps(launches)
    for number in range(len(launches) + 1):
        for step in steps:
            if step.before == number:
                step.run()
        if number < len(launches):
            notes.append(f"launch {number}")
    return list(notes)


def streamed(count):
    stream = WeightStream()
    for number in range(count):
        group = stream.new_group(f"g{number}")
        storage = group.storage("w", 8)
        group.put(storage, np.full(2, number, np.float32))
    return stream


def test_groups_take_turns_in_two_buffers_and_stay_there(device):
    stream, engine = streamed(3), OffloadEngine(device)
    launches = [launch(group) for group in stream.groups]
    first = run(engine, launches)
    assert first == [
        "write buffer 1 0 8", "ask fence", "write buffer 2 0 8", "ask fence", "launch 0",
        "take fence", "write buffer 1 0 8", "ask fence", "launch 1", "launch 2",
    ]  # fmt: skip
    # All buffers are as large as the largest group, and one that is there is not brought again.
    assert [kind for _, kind, _ in device.buffers] == ["staging"] * 3
    assert device.buffers[0] == (stream.buffer_bytes, "staging", False)
    again = run(engine, launches)
    assert [note for note in again if note.startswith("write")] == ["write buffer 1 0 8"] * 2
    assert engine.moved == 5 * 8


def test_one_group_has_one_buffer(device):
    stream, engine = streamed(1), OffloadEngine(device)
    (group,) = stream.groups
    storage = Storage("w", "base", 8, group=group, first_byte=32)
    assert engine.window(storage, 4, 8) == ("buffer 1", 36, 8)
    run(engine, [launch(group)])
    assert len([each for each in device.buffers if each[0] == stream.buffer_bytes]) == 1


def test_what_is_saved_is_brought_back_where_the_one_before_is_read(device):
    engine, outgoing, incoming = OffloadEngine(device), Storage("o", "staging", 8), []
    for number in range(2):
        incoming.append(Storage(f"i{number}", "staging", 8))
        incoming[-1].buffer = f"in {number}"
    outgoing.buffer = "out"
    device.contents["out"] = b"abcdefgh1234"
    own = [OffloadedTensor(f"x{number}", 8 - 2 * number) for number in range(2)]
    launches = [
        launch(saves={"to": own[0]}, to=outgoing), launch(saves={"to": own[1]}, to=outgoing),
        launch(), launch(fetched={"of": own[1]}, of=incoming[1]),
        launch(), launch(fetched={"of": own[0]}, of=incoming[0]),
    ]  # fmt: skip
    assert fetches(launches) == [(3, 3), (3, 5)]
    assert run(engine, launches) == [
        "launch 0", "ask out", "launch 1", "ask out", "launch 2",
        "take out", "take out", "write in 1 0 6", "ask fence",
        "write in 0 0 8", "ask fence", "launch 3", "launch 4", "launch 5",
    ]  # fmt: skip
    assert bytes(own[0].data) == b"abcdefgh" and bytes(own[1].data) == b"abcdef"
    assert engine.moved == 2 * (8 + 6)


def test_no_more_than_two_downloads_are_under_way_and_what_lasts_arrives(device):
    engine, outgoing = OffloadEngine(device), Storage("o", "staging", 4)
    outgoing.buffer, device.contents["out"] = "out", b"abcd"
    own = [OffloadedTensor(f"x{number}", 4) for number in range(3)]
    launches = [launch(saves={"to": each}, to=outgoing) for each in own]
    notes = run(engine, launches)
    assert notes == ["launch 0", "ask out", "launch 1", "ask out", "launch 2", "take out",
                     "ask out"]  # fmt: skip
    assert own[1].data is None
    own[2].lasts = True
    kept = own[0].data
    run(engine, launches)
    assert all(bytes(each.data) == b"abcd" for each in own) and own[0].data is kept


def test_the_driver_holds_two_of_each_transfer():
    outgoing, twice = Storage("o", "staging", 8), OffloadedTensor("x", 24)
    step = launch(saves={"to": OffloadedTensor("x", 10)}, fetched={"of": twice}, to=outgoing)
    plan = SimpleNamespace(streams=[SimpleNamespace(buffer_bytes=20)], launches=[step, step])
    assert transfer_bytes(plan) == 2 * (24 + 10)
    plan.streams[0].buffer_bytes = 30
    assert transfer_bytes(plan) == 2 * (30 + 10)
    assert transfer_bytes(SimpleNamespace(streams=[], launches=[])) == 0

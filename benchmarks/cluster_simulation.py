"""Simulates a cluster of up to 1,000 heterogeneous workers and its network links.

usage: python benchmarks/cluster_simulation.py [--seed S]

Speeds and links are random, and blocks are assigned by the package's own ``Scheduler``. It needs no
GPU and no network, and takes a few minutes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from qlora_wgpu.cluster.scheduler import Assignment, Scheduler

WORKERS = (4, 30, 300, 1000)
OWNERS_GIGABITS = (1, 10, 100)
GIGABITS = (0.3, 1, 1, 2.5, 10)  # of workers, uniformly chosen
SPREAD = 0.5  # std of the logarithm of speed: a sixth is slower than 0.6 of the median
JITTER = 0.05  # standard deviation of the logarithm of a block's seconds
DELAY = 0.001  # seconds
LOST = 0.01  # share of workers in each step: half of them crash, half are silent for a while
NOTICED, BACK, SILENT = 10.0, 60.0, 40.0  # seconds to detection, replacement, end of silence
BATCHED = 0.01  # of a micro-batch's seconds: results that the owner handles at once
TOKENS = 1024


@dataclass(frozen=True)
class Model:
    """The trained model.

    Attributes:
        name: Label in the table.
        megabytes: Size of the adapter, and of each gradient.
        seconds: Duration of a micro-batch on the median worker.
        blocks: Micro-batches of a step per worker.
    """

    name: str
    megabytes: float
    seconds: float
    blocks: int = 4


# As in cluster.py: r 16 on all linear layers, 1,024 tokens
SMALL, LARGE = Model("8B", 168, 5.1), Model("8B, 8 × the tokens", 168, 41.0)


@dataclass
class Link:
    """A link that transfers one message at a time."""

    gigabits: float
    free: float = 0.0  # time at which its last transfer ends

    def carry(self, megabytes: float, now: float) -> float:
        """The time at which a transfer that is queued now ends."""
        self.free = max(now, self.free) + self.seconds(megabytes)
        return self.free

    def seconds(self, megabytes: float) -> float:
        return megabytes / 125 / self.gigabits


@dataclass
class Worker:
    """A worker, which computes one block at a time."""

    speed: float
    link: Link
    version: int = -1  # step of its parameters
    ready: float = 0.0  # time at which it has them
    free: float = 0.0  # time at which it has computed its blocks
    silent: float = 0.0  # time until which it sends nothing
    is_running: bool = True


@dataclass
class Cluster:
    """Random workers, and the queue of events."""

    rng: random.Random
    model: Model
    count: int
    gigabits: float
    now: float = 0.0
    scheduler: Scheduler = field(default_factory=Scheduler)
    workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers, self._names = itertools.count(), itertools.count()
        self._down, self._up = Link(self.gigabits), Link(self.gigabits)
        for _ in range(self.count):
            self._join()
        self.speed = sum(worker.speed for worker in self.workers.values())

    def _join(self, speed: float | None = None) -> None:
        name, rng = str(next(self._names)), self.rng
        own = rng.lognormvariate(0, SPREAD) if speed is None else speed
        self.workers[name] = Worker(own, Link(min(rng.choice(GIGABITS), self.gigabits)))
        self.scheduler.add(name)

    def _later(self, seconds: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), kind, what))

    def step(self, number: int) -> float:
        """Simulates a step; returns its seconds."""
        began, batch = self.now, BATCHED * self.model.seconds
        self.scheduler.begin([TOKENS] * self.model.blocks * self.count)
        self._draw_losses()
        while not self.scheduler.is_complete:
            for order in self.scheduler.next(self.now):
                self._send(order, number)
            until = self.now + batch
            if not self._events or self._events[0][0] > until:  # check for late blocks
                until = self.now + max(0.2, self.model.seconds / 5)
                until = min([until, *(event[0] + batch for event in self._events[:1])])
            while self._events and self._events[0][0] <= until:
                self.now, _, kind, what = heapq.heappop(self._events)
                getattr(self, f"_{kind}")(what)
            self.now = until
        return self.now - began

    def _draw_losses(self) -> None:
        for name in list(self.workers):
            if self.rng.random() < LOST:
                after = self.rng.uniform(0, self.model.seconds * self.model.blocks)
                self._later(after, self.rng.choice(["lose", "silence"]), name)

    def _lose(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].is_running = False
            self._later(NOTICED, "notice", name)
            self._later(BACK, "replace", self.workers[name].speed)

    def _notice(self, name: str) -> None:
        self.scheduler.remove(name)
        del self.workers[name]

    def _replace(self, speed: float) -> None:
        self._join(speed)

    def _silence(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].silent = self.now + SILENT

    def _send(self, order: Assignment, number: int) -> None:
        """Sends parameters, once per step, and a block; schedules the end of its computation."""
        worker = self.workers[order.worker]
        if worker.version != number:
            worker.version = number
            sent = self._down.carry(self.model.megabytes, self.now)
            worker.ready = max(sent, worker.link.seconds(self.model.megabytes) + self.now) + DELAY
        takes = self.model.seconds / worker.speed * self.rng.lognormvariate(0, JITTER)
        worker.free = max(worker.ready, worker.free) + takes
        self._later(worker.free - self.now, "computed", (order, takes))

    def _computed(self, what: tuple[Assignment, float]) -> None:
        worker = self.workers.get(what[0].worker)
        if worker is None or not worker.is_running:
            return
        if worker.silent > self.now:
            self._later(worker.silent - self.now, "computed", what)
            return
        there = max(self._up.carry(self.model.megabytes, self.now),
                    worker.link.carry(self.model.megabytes, self.now))  # fmt: skip
        self._later(there + DELAY - self.now, "done", what)

    def _done(self, what: tuple[Assignment, float]) -> None:
        self.scheduler.done(what[0], self.now, what[1])


def simulated(model: Model, count: int, gigabits: float, seed: int) -> tuple[float, float, Cluster]:
    """Average seconds of a step after a warm-up, their minimum by speed, and the cluster."""
    cluster, steps = Cluster(random.Random(seed), model, count, gigabits), 3 if count < 300 else 1
    seconds = [cluster.step(number) for number in range(steps + 1)][1:]
    least = model.blocks * count * model.seconds / cluster.speed
    return sum(seconds) / steps, least, cluster


def in_tree(megabytes: float, links: list[float], gigabits: float, fan: int) -> float:
    """Seconds of sending parameters down a tree, and sums up.

    The owner is the root, and workers with fast links are its neighbours. Each node adds up the
    sums of its children and its own, and sends one.
    """
    nodes = [gigabits, *sorted(links, reverse=True)]

    def both_ways(place: int) -> float:
        children = range(fan * place + 1, min(fan * place + fan + 1, len(nodes)))
        sent, slowest = 0.0, 0.0
        for child in children:
            sent += megabytes / 125 / min(nodes[place], nodes[child])
            slowest = max(slowest, 2 * sent + both_ways(child))  # sums arrive in the same order
        return slowest

    return both_ways(0)


def rows(seed: int) -> Iterator[list[str]]:
    """Yields the table's rows."""
    for model, count in itertools.product((SMALL, LARGE), WORKERS):
        traffic = model.megabytes * count * (model.blocks + 1) / 1000
        bare = Model("", 0.001, model.seconds, model.blocks)
        free, least, cluster = simulated(bare, count, 100, seed)
        cells = [_with_link(model, count, gigabits, seed, least) for gigabits in OWNERS_GIGABITS]
        links = [worker.link.gigabits for worker in cluster.workers.values()]
        tree = free + min(in_tree(model.megabytes, links, 10, fan) for fan in (2, 4, 8, 16))
        yield [
            model.name, f"{count:,}", f"{traffic:,.0f} GB", *cells, _share(least / tree),
            _share(least / free),
        ]  # fmt: skip


def _with_link(model: Model, count: int, gigabits: float, seed: int, least: float) -> str:
    """Utilization; only an upper bound if gradients take ten times as long as computing."""
    gradients = Link(gigabits).seconds(model.megabytes) * model.blocks * count
    if gradients > 10 * least:
        return f"under {_share(math.ceil(100 * least / gradients) / 100)}"
    seconds, least, _ = simulated(model, count, gigabits, seed)
    return _share(least / seconds)


def _share(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    names = [f"{gigabits} Gbit/s" for gigabits in OWNERS_GIGABITS]
    head = ["", "workers", "a step carries", *names, "10 Gbit/s, in a tree", "no link"]
    for row in itertools.chain([head, ["---"] * len(head)], rows(seed)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

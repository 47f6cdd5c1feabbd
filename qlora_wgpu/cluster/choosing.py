"""Who is to compute which of a step's blocks: the choice, from what is known at a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qlora_wgpu.cluster.crew import Crew
from qlora_wgpu.cluster.orders import Order, in_order

Choice = tuple[str, int]  # a worker's name and a block


@dataclass
class Step:
    """The blocks of a step, and what has become of them.

    Attributes:
        number: Of all steps that were begun.
        kind: What is computed of each block.
        sizes: Tokens of each block, padding included.
        turn: Workers in whose turn blocks are given, where that is fixed.
        wanted: Blocks that nobody computes, in their order.
        finished: Blocks that have a result.
        doubted: By block, the workers whose result for it is not believed.
    """

    number: int = 0
    kind: str = ""
    sizes: Sequence[int] = ()
    turn: Sequence[str] = ()
    wanted: list[int] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    doubted: dict[int, set[str]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether every block has a result."""
        return len(self.finished) == len(self.sizes)

    def able(self, block: int, names: Sequence[str]) -> list[str]:
        """Those of some workers who are not doubted for a block."""
        return [name for name in names if name not in self.doubted.get(block, ())]

    def take(self, block: int) -> None:
        """A block is no longer wanted."""
        if block in self.wanted:
            self.wanted.remove(block)

    def finish(self, block: int) -> None:
        """A block has a result."""
        self.finished.add(block)
        self.take(block)

    def want(self, order: Order, crew: Crew) -> None:
        """Gives a block out again, unless it is an older step's, done, or with somebody else."""
        block = order.block
        if order.step != self.number or block in self.finished or block in self.wanted:
            return
        usable = set(self.able(block, crew.usable))
        if not self.is_with(usable, block, crew):
            self.wanted.append(block)
            self.wanted.sort()

    def is_with(self, names: set[str], block: int, crew: Crew) -> bool:
        """Whether one of some workers has a block of this step."""
        return any(
            (held.order.step, held.order.block) == (self.number, block)
            for name in names
            for held in crew.records[name].held.values()
        )


def first_choices(
    step: Step, crew: Crew, now: float, *, fixed: bool, slots: int, window: int
) -> list[Choice]:
    """Who gets which of the blocks that nobody computes.

    Args:
        step: The step.
        crew: The workers.
        now: The time.
        fixed: Whether what was measured does not count.
        slots: Blocks that a worker may have.
        window: For each worker, how many blocks past the first that is not done may be given out.
    """
    usable = crew.usable
    first = min((i for i in range(len(step.sizes)) if i not in step.finished), default=0)
    limit = first + window * max(len(usable), 1)
    free = {name: slots - len(crew.records[name].held) for name in usable}
    ends = {name: crew.end(crew.records[name], now) for name in usable}
    paces = {name: crew.pace(crew.records[name], step.kind) for name in usable}
    chosen = []
    for block in step.wanted:
        if block >= limit or not any(count > 0 for count in free.values()):
            break
        able, size = step.able(block, usable), step.sizes[block]
        if not able:
            continue
        if fixed:
            name = _in_turn(step, block, able)
        else:
            name = min(able, key=lambda name: ends[name] + size * paces[name])
        ends[name] += size * paces[name]
        if free[name] > 0:  # else it waits for this worker, who is done sooner than others
            chosen.append((name, block))
        free[name] -= 1
    return chosen


def _in_turn(step: Step, block: int, able: list[str]) -> str:
    count = len(step.turn)
    turns = (step.turn[(block + i) % count] for i in range(count))
    return next((name for name in turns if name in able), able[block % len(able)])


def copies(step: Step, crew: Crew, now: float) -> list[Choice]:
    """Who, of those that have nothing to do, gets a block that another may be stuck with.

    That one may just as well be compiling, so that it is not suspect yet.
    """
    if step.wanted:
        return []
    idle = [name for name in crew.usable if not crew.records[name].held]
    stuck = {
        record.name
        for record in crew.records.values()
        if record.is_suspect or now > crew.due(record, compiles=False)
    }
    others = set(crew.records) - stuck
    chosen: list[Choice] = []
    for name in sorted(stuck, key=in_order):
        record = crew.records[name]
        for held in record.held.values() if not record.is_suspect else ():
            block, able = held.order.block, step.able(held.order.block, idle)
            is_open = held.order.step == step.number and block not in step.finished
            is_chosen = block in [chosen_block for _, chosen_block in chosen]
            if able and is_open and not is_chosen and not step.is_with(others, block, crew):
                copier = _one_that_knows(able, step.kind, held.size, crew)
                idle.remove(copier)
                chosen.append((copier, block))
    return chosen


def _one_that_knows(able: list[str], kind: str, size: int, crew: Crew) -> str:
    """One that has done such a block before, if there is one: it need not compile for it."""
    return min(able, key=lambda name: size not in crew.records[name].speeds[kind].known)

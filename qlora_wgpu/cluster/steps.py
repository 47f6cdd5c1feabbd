"""A step's blocks, on workers: sent, answered, and sent again where that is needed."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_wgpu.cluster.blocks import Asked, Sums
from qlora_wgpu.cluster.division import Division
from qlora_wgpu.cluster.expected import Expected, WrongAnswerError
from qlora_wgpu.cluster.member import Gone, Member
from qlora_wgpu.cluster.members import Members, sentence
from qlora_wgpu.cluster.orders import Order
from qlora_wgpu.cluster.parameters import Parameters
from qlora_wgpu.cluster.patience import Patience
from qlora_wgpu.cluster.progress import Progress
from qlora_wgpu.cluster.suspects import Suspects
from qlora_wgpu.errors import ClusterError, QLoRAError

Deliver = Callable[[int, Sums], None]


@dataclass(frozen=True, eq=False)
class Block:
    """What a worker is asked, and what form its answer has.

    Attributes:
        given: Arguments of the worker's method, after what it is asked as.
        expected: The answer's form.
    """

    given: tuple[Any, ...]
    expected: Expected


class Steps:
    """Computes one step after another."""

    def __init__(
        self,
        division: Division,
        members: Members,
        parameters: Parameters,
        suspects: Suspects,
        progress: Progress,
        patience: Patience,
    ) -> None:
        """Has done none yet."""
        self._division = division
        self._members = members
        self._parameters = parameters
        self._suspects = suspects
        self._progress = progress
        self._patience = patience
        self._results: deque[tuple[Order, Member, Sums]] = deque()  # of older steps, too
        self._doubtful: dict[int, tuple[Member, Sums]] = {}  # by block

    async def compute(
        self, method: str, blocks: Sequence[Block], sizes: Sequence[int], deliver: Deliver
    ) -> None:
        """Computes all blocks of a step.

        Args:
            method: The worker's, such as ``"gradient"`` or ``"loss"``.
            blocks: What is asked, and the form of the answer.
            sizes: Each block's tokens, padding included.
            deliver: Takes each block's number and its sums, once, in any order.

        Raises:
            ClusterError: If nobody is left to compute them.
        """
        division = self._division
        division.begin(sizes, method)
        self._doubtful = {}
        self._progress.advance()
        while not division.is_complete or self._doubtful:
            ready = {member.name: member for member in self._members.ready}
            for order in division.next(time.monotonic()):
                work = self._send(ready[order.worker], order, method, blocks[order.block])
                self._progress.spawn(work)
            self._suspects.probe()
            await self._progress.change()
            while self._results:
                order, member, sums = self._results.popleft()
                if division.done(order, time.monotonic(), sums.seconds):
                    self._progress.advance()
                    self._take(order, member, sums, deliver)
            self._settle(deliver)
            if not division.is_complete or self._doubtful:
                self._patience.check("no block has come back")

    def _take(self, order: Order, member: Member, sums: Sums, deliver: Deliver) -> None:
        """Takes a block's first result, or its second where the first was not finite."""
        before = self._doubtful.pop(order.block, None)
        if sums.is_finite or before is not None:
            if before is not None and sums.is_finite:
                self._members.leave_out(
                    before[0],
                    f"it returned a gradient or loss that is not finite, where worker "
                    f"{member.name} did not",
                )
            deliver(order.block, sums)
        elif self._division.doubt(order):
            self._doubtful[order.block] = (member, sums)
        else:
            deliver(order.block, sums)

    def _settle(self, deliver: Deliver) -> None:
        """Takes results that are not finite where nobody is left who could know better."""
        left = [n for n in self._doubtful if not self._division.is_left_to_others(n)]
        for number in left:
            self._division.settle(number)
            deliver(number, self._doubtful.pop(number)[1])

    async def _send(self, member: Member, order: Order, method: str, block: Block) -> None:
        """Has a worker compute a block; what goes wrong is its end, not the step's."""
        try:
            version = await self._parameters.give(member)
            self._division.begun(order, time.monotonic())
            asked = Asked(version, secrets.randbits(62))
            sums = await self._members.call(member, method, asked, *block.given)
            self._results.append((order, member, block.expected.check(asked, sums)))
        except Gone:
            self._division.failed(order)
        except OSError:
            self._division.failed(order)
            self._division.suspect(member.name)
        except QLoRAError as err:
            self._division.failed(order)
            member.version = -1
            if isinstance(err, WrongAnswerError) or not isinstance(err, ClusterError):
                self._members.leave_out(member, sentence(err))
        except Exception as err:
            self._division.failed(order)
            self._members.leave_out(member, sentence(err))
        finally:
            self._progress.notify()

"""Questions that any one worker can answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from qlora_wgpu.cluster.division import Division
from qlora_wgpu.cluster.expected import WrongAnswerError
from qlora_wgpu.cluster.member import Gone, Member
from qlora_wgpu.cluster.members import Members, sentence
from qlora_wgpu.cluster.patience import Patience
from qlora_wgpu.cluster.progress import Progress
from qlora_wgpu.cluster.suspects import Suspects
from qlora_wgpu.errors import ClusterError, DeviceLostError, OutOfMemoryError, QLoRAError

_LONG = 15.0  # seconds after which another worker is asked, too

_T = TypeVar("_T")


async def anyone(
    ask: Callable[[Member], Coroutine[Any, Any, _T]],
    division: Division,
    members: Members,
    suspects: Suspects,
    progress: Progress,
    patience: Patience,
) -> _T:
    """Asks one worker, and another if that fails or takes long; the first answer counts.

    Raises:
        ClusterError: If nobody answers.
        OutOfMemoryError: If no worker that is there has room for it.
        QLoRAError: What is not the worker's own fault.
    """
    progress.advance()
    asked: dict[asyncio.Task[_T], Member] = {}
    tried: set[Member] = set()
    failure: QLoRAError | None = None
    since = -math.inf
    try:
        while True:
            free = [
                member
                for member in members.ready
                if member not in tried and member.name not in division.suspects
            ]
            if failure is not None and not (free or asked):
                raise failure
            if free and (not asked or time.monotonic() - since > _LONG):
                since = time.monotonic()
                tried.add(free[0])
                asked[asyncio.ensure_future(ask(free[0]))] = free[0]
            suspects.probe()
            await progress.change()
            for task in [task for task in asked if task.done()]:
                member = asked.pop(task)
                try:
                    return task.result()
                except WrongAnswerError as err:
                    members.leave_out(member, str(err))
                except (Gone, OSError, ClusterError):  # somebody else is asked
                    member.version = -1
                    division.suspect(member.name)
                    tried.discard(member)
                except (OutOfMemoryError, DeviceLostError) as err:  # another may have more room
                    failure = err
                except QLoRAError:
                    raise
                except Exception as err:  # whatever a worker says
                    members.leave_out(member, sentence(err))
            patience.check("no worker has answered")
    finally:
        for task in asked:
            task.cancel()

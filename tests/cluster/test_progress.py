"""What goes on by itself ends when it is asked to."""

import asyncio

import pytest
from support.processes import PATIENCE

from qlora_wgpu.cluster.workers import Progress
from qlora_wgpu.errors import ClusterError


async def deaf():
    """Loses two cancellations, as a call of Dask's may."""
    for _ in range(3):
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            continue


@pytest.mark.slow
def test_what_loses_a_cancellation_is_cancelled_again():
    async def ended():
        progress = Progress()
        progress.spawn(deaf())
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await progress.stop()

    asyncio.run(ended())


def test_who_waits_gets_the_failure():
    async def waited():
        progress = Progress()
        progress.notify()
        await progress.change()
        progress.fail(ClusterError("the scheduler is gone"))
        await progress.change()

    with pytest.raises(ClusterError, match="gone"):
        asyncio.run(waited())

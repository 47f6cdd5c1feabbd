"""An engine on a real scheduler with workers that compute next to nothing, and what it tells."""

import time
from contextlib import contextmanager

import numpy as np
from cluster.odd_workers import OddWorker
from support.processes import PATIENCE

from qlora_wgpu.cluster.blocks import Expected, WorkerSpec, check_text
from qlora_wgpu.cluster.connection import LoopThread, connect
from qlora_wgpu.cluster.owner import Block, Engine
from qlora_wgpu.config import ClusterConfig

PARAMETERS = np.arange(64, dtype=np.float32)
BLOCKS = [(np.full((1, 10), i),) for i in range(10)]


class Told(list):
    def __call__(self, text):
        self.append(text)

    def of(self, word):
        return [text for text in self if word in text]


@contextmanager
def an_engine(address, count=2, check=None, told=None, **settings):
    """An engine with open workers, and what it tells."""
    told, thread = Told() if told is None else told, LoopThread()
    connection = thread.run(connect(ClusterConfig(scheduler=address), 0, told))

    async def made():
        return Engine(
            connection,
            OddWorker,
            lambda name: WorkerSpec(settings, 8, "1", {}, name),
            check or (lambda identity: None),
            told,
            fixed=False,
            patience=PATIENCE,
        )

    engine = thread.run(made())
    try:
        if count:
            thread.run(engine.begin(count))
        engine.publish(PARAMETERS)
        yield Asked(thread, engine, told)
    finally:
        thread.run(engine.stop())
        thread.run(connection.close())
        thread.stop(5)


class Asked:
    """An engine, as a run asks it."""

    def __init__(self, thread, engine, told):
        self.thread, self.engine, self.told = thread, engine, told

    def step(self, blocks=BLOCKS):
        """What a step's blocks give, by their numbers."""
        return self.begin_step(blocks).result(PATIENCE)

    def begin_step(self, blocks=BLOCKS):
        got = {}

        def deliver(block, sums):
            assert block not in got
            got[block] = sums

        async def stepped():
            sizes = [block[0].size for block in blocks]
            asked = [
                Block(block, Expected(1.0, gradient=PARAMETERS.size).check) for block in blocks
            ]
            await self.engine.compute("gradient", asked, sizes, deliver)
            return got

        return self.thread.submit(stepped())

    def text(self, ids, more):
        def check(written):
            return check_text(written, more, vocab_size=9)

        return self.thread.run(self.engine.query("text", ids, more, check=check))

    def tokens(self):
        """What each worker computed of gradients since this was asked last."""
        return {each.name: each.tokens for each in self.thread.run(self.engine.worker_metrics())}

    def lose_patience(self, times=PATIENCE):
        """Has the engine find, at so many looks, that nothing has got on for long; these looks."""
        looks, patience = [], self.engine._patience
        check = patience.check

        def checked(*what, **count):
            if len(looks) < times:
                self.engine._progress._advanced = time.monotonic() - 2 * PATIENCE
            looks.append(what)
            check(*what, **count)

        patience.check = checked
        return looks

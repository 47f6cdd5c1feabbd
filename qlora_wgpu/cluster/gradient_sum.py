"""The sum of workers' gradients, made on the device that holds the adapter."""

from __future__ import annotations

import numpy as np

from qlora_wgpu.cluster.blocks import FloatArray, Sums
from qlora_wgpu.graph.pieces import Pieces
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.adamw import (
    SATURATED_OFFSET,
    STATS_BALANCE,
    STATS_CORRECT,
    STATS_LOSS,
    STATS_TOKENS,
)
from qlora_wgpu.ops.tensor import add_to


def received_gradient(adapter: Adapter) -> Pieces:
    """Room for a gradient that has come from a worker."""
    return Pieces.laid_out("received gradient", "gradients", "float32", adapter.piece_lengths)


class GradientSum:
    """Adds one block's gradient after another, as the kernels of a single device do."""

    def __init__(self, model: AdapterModel) -> None:
        """Allocates room for a gradient that has come.

        Args:
            model: The adapter.
        """
        self._model = model
        self._received = received_gradient(model.adapter)
        graph = model.new_graph()
        add_to(graph, model.adapter.gradient, self._received)
        self._program = model.new_program(graph)
        self.begin()

    def parameters(self) -> FloatArray:
        """The adapter's parameters; waits for the device."""
        return self._model.read_flat(self._model.adapter.parameters)

    def begin(self) -> None:
        """A step begins."""
        self._loss = self._tokens = self._correct = self._balance = np.float32(0)
        self._saturated = 0

    def add(self, sums: Sums) -> None:
        """Adds a block's sums."""
        assert sums.gradient is not None
        self._model.write_flat(self._received, sums.gradient)
        self._program.run()
        self._loss += np.float32(sums.loss)
        self._tokens += np.float32(sums.tokens)
        self._correct += np.float32(sums.correct)
        self._balance += np.float32(sums.balance)
        self._saturated += sums.saturated

    def end(self) -> None:
        """Puts the step's loss, label tokens and hits where the update and the log read them."""
        storage = self._model.stats.storage
        assert storage is not None
        stats = np.zeros(storage.nbytes // 4, np.float32)
        stats[STATS_LOSS], stats[STATS_TOKENS] = self._loss, self._tokens
        stats[STATS_CORRECT], stats[STATS_BALANCE] = self._correct, self._balance
        if storage.nbytes > SATURATED_OFFSET:
            stats.view(np.uint32)[SATURATED_OFFSET // 4] = self._saturated
        self._model.write_flat(self._model.stats, stats)

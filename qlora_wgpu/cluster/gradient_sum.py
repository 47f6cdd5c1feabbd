"""The sum of workers' gradients, made on the device that holds the adapter."""

from __future__ import annotations

from qlora_wgpu.cluster.blocks import FloatArray, Sums
from qlora_wgpu.cluster.running_sums import RunningSums
from qlora_wgpu.graph.sharded_vector import Pieces
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.tensor import add_to


def received_gradient(adapter: Adapter) -> Pieces:
    """Room for a gradient that has come from a worker."""
    return Pieces.laid_out("received gradient", "gradients", "float32", adapter.piece_lengths)


class GradientSum:
    """Adds one block's gradient after another, as the kernels of a single device do.

    Attributes:
        model: The adapter.
        sums: What blocks of the step have given beside their gradients.
    """

    def __init__(self, model: AdapterModel) -> None:
        """Allocates room for a gradient that has come.

        Args:
            model: The adapter.
        """
        self.model = model
        self._received = received_gradient(model.adapter)
        graph = model.new_graph()
        add_to(graph, model.adapter.gradient, self._received)
        self._program = model.new_program(graph)
        self.begin()

    def parameters(self) -> FloatArray:
        """The adapter's parameters; waits for the device."""
        return self.model.read_flat(self.model.adapter.parameters)

    def begin(self) -> None:
        """A step begins."""
        self.sums = RunningSums()

    def add(self, sums: Sums) -> None:
        """Adds a block's sums."""
        assert sums.gradient is not None
        self.model.write_flat(self._received, sums.gradient)
        self._program.run()
        self.sums.add(sums)

    def end(self) -> None:
        """Puts the step's loss, label tokens and the rest where update and log read them."""
        self.model.write_stats(self.sums.stats, self.sums.saturated)

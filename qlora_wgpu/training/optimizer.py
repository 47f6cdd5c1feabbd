"""AdamW or Lion for a model's adapter: state on the device, one short program per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.config import OptimConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.ops.moments import MomentsPart, moments_in_parts
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw, lion
from qlora_wgpu.training.schedule import STEP_NUMBERS, Schedule


def trace_update(
    graph: Graph,
    adapter: AdapterLayout,
    stats: Tensor,
    info: Tensor,
    optim: OptimConfig,
    passing: Sequence[MomentsPart] = (),
) -> None:
    """Adds the launches of one update."""
    state = OptimizerState(
        parameters=adapter.parameters,
        gradient=adapter.gradient,
        moments=adapter.moments.vectors,
        step_info=info,
        stats=stats,
        split=adapter.b_begin,
        passing=passing,
    )
    config = OptimizerConfig(
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_epsilon=optim.adam_epsilon,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
    )
    if optim.name == "lion":
        lion(graph, state, config)
    else:
        adamw(graph, state, config, adapter.moments.blocks)


def _on_host(moment: ShardedVector) -> list[npt.NDArray[Any]]:
    """The places of a moment's pieces in host memory, made the first time."""
    places = []
    for piece in moment.shards:
        assert piece.storage is not None
        if piece.storage.on_host is None:
            piece.storage.on_host = np.zeros(piece.columns, piece.dtype)
        places.append(piece.storage.on_host)
    return places


class Optimizer:
    """Clips and applies the gradient that a model has summed up."""

    def __init__(self, model: AdapterModel, optim: OptimConfig, total_steps: int) -> None:
        """Allocates the moments, zeroed, and compiles the update."""
        self._model = model
        self._trained = model.active_adapter
        self.schedule = Schedule(optim, total_steps)  # of its learning rates
        info = Storage("step info", "inputs", 4 * STEP_NUMBERS)
        self._info = vector("step_info", STEP_NUMBERS, "float32", info)
        graph, adapter = model.layout.new_graph(), model.adapter
        adapter.keep_moments(optim.name)
        zeros = adapter.moments.zeros()
        passing: Sequence[MomentsPart] = ()
        if model.layout.offload.host_moments:
            passing = moments_in_parts(
                [_on_host(each) for each in adapter.moments.vectors],
                adapter.moments.blocks,
            )
        trace_update(graph, adapter, model.stats, self._info, optim, passing)
        self._program = model.programs.from_graph(graph)
        for moment in adapter.moments.vectors:
            model.write_flat(moment, zeros)

    def step(self, step: int) -> None:
        """Queues the update of step 1, 2, …; does not wait. The gradient is zeroed by it."""
        if self._model.active_adapter != self._trained:
            raise ConfigError(
                f"adapter {self._model.active_adapter!r} is active, but {self._trained!r} is in "
                f"training: set_adapter({self._trained!r}) before the next step"
            )
        self._model.write_flat(self._info, self.schedule.row(step))
        self._program.run()
        self._model.parameters_changed = True

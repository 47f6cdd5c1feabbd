"""A model's programs on its device, each made once for what it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.host_steps import HostTraffic
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.graph.program import Program, SlotPool
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.options import StepOptions
from qlora_wgpu.model.token_programs import TokenPrograms
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.kv_cache import KVCache


@dataclass(frozen=True)
class LogitsPrograms:
    """Hidden states of a batch, and from them the logits of a few rows at a time."""

    device: Device
    batch: BatchBuffers
    hidden: Program
    head: Program
    logits: Tensor

    def run(
        self,
        ids: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        rows: npt.NDArray[np.integer[Any]],
        past: int = 0,
        place: int = 0,
    ) -> npt.NDArray[np.float32]:
        """Logits (len(rows), vocab_size) of some of the batch's flattened positions.

        Args:
            ids: (batch, seq), checked.
            mask: (batch, seq), checked.
            rows: The positions.
            past: Tokens that came before, kept in the batch's cache.
            place: Which of the cache's texts it is.
        """
        with self.device.in_turn:
            return self._run(ids, mask, rows, past, place)

    def _run(
        self,
        ids: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        rows: npt.NDArray[np.integer[Any]],
        past: int,
        place: int,
    ) -> npt.NDArray[np.float32]:
        count = self.logits.rows
        out = np.empty((len(rows), self.logits.columns), np.float32)
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            batch_encoding.write_batch(
                self.device, self.batch, ids, mask, rows=part, past=past, places=place
            )
            if first == 0:
                self.hidden.run()
            self.head.run()
            values = np.frombuffer(self.head.read(self.logits), np.float32).reshape(count, -1)
            out[first : first + len(part)] = values[: len(part), : out.shape[1]]
        return out


class Programs:
    """A model's programs; they share the memory of intermediates, since one runs at a time."""

    def __init__(self, layout: ModelLayout, device: Device, beside: Programs | None = None) -> None:
        """Makes none yet.

        Args:
            layout: What is traced.
            device: Where it will run.
            beside: Others of the same base, with which the memory of intermediates is shared.
        """
        self._layout = layout
        self._device = device
        self._pool: SlotPool = SlotPool(device) if beside is None else beside._pool
        self._steps: dict[StepOptions, tuple[BatchBuffers, Program]] = {}

    @property
    def traffic(self) -> HostTraffic:
        """What comes and goes while they run."""
        return self._pool.traffic

    def from_graph(
        self, graph: Graph, outputs: tuple[Tensor, ...] = (), *, apart: bool = False
    ) -> Program:
        """Plans a graph and makes it ready; ``outputs`` can be read after a run."""
        with self._device.in_turn:
            return Program(self._device, make_plan(graph, outputs, apart=apart), self._pool)

    def fill_kept(self) -> None:
        """Dequantizes the weights that are kept so; their codes are there by now."""
        if self._layout.filling is not None:
            with self._device.in_turn:
                Program(self._device, self._layout.filling, self._pool).run()

    def step(self, options: StepOptions) -> tuple[BatchBuffers, Program]:
        """A step's inputs and its program."""
        with self._device.in_turn:
            if options not in self._steps:
                planned = self._layout.step(options)
                program = Program(self._device, planned.plan, self._pool)
                self._steps[options] = planned.batch, program
            return self._steps[options]

    def tokens(
        self, texts: int, length: int, cache: KVCache, seen: Tensor, *, told: bool = False
    ) -> TokenPrograms:
        """New programs for so many tokens of some of a cache's texts, which choose the next ones.

        Args:
            texts: How many texts.
            length: Tokens of each: one that is new, or a prompt's.
            cache: Keys, values and states.
            seen: The bits of all texts' tokens.
            told: Whether the logits can be read as well.
        """
        with self._device.in_turn:
            graphs = self._layout.token_graphs(texts, length, cache, seen, told=told)
            self._fill_strips()
            kept, apart = graphs.kept, graphs.apart
            first = self.from_graph(graphs.hidden, apart=apart)
            second = self.from_graph(graphs.head, () if kept is None else (kept,), apart=apart)
            return TokenPrograms(
                self._device, graphs.batch, graphs.next, first, second, graphs.choices,
                self._layout.pretrained.architecture.vocab_size, kept,
            )  # fmt: skip

    def logits(self, batch: BatchBuffers) -> LogitsPrograms:
        """New programs for a batch, which may carry a cache of keys and values."""
        with self._device.in_turn:
            hidden, graph, logits = self._layout.logits_graphs(batch)
            self._fill_strips()
            first = self.from_graph(hidden)
            head = self.from_graph(graph, (logits,))
            return LogitsPrograms(self._device, batch, first, head, logits)

    def _fill_strips(self) -> None:
        """Makes the copies of weights that have been traced and are not there."""
        if self._layout.strips.waits:
            graph = self._layout.new_graph()
            self._layout.strips.fill(graph)
            self.from_graph(graph).run()

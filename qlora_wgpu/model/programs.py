"""A model's programs on its device, each made once for what it computes."""

from __future__ import annotations

from collections.abc import Sequence
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
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import MOST_AHEAD, Choices, Settings, encode_choices, seen_bits


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


@dataclass(frozen=True)
class TokenPrograms:
    """Hidden states of a batch with a cache, and from them each text's next token.

    Attributes:
        device: Where they run.
        batch: Their inputs.
        hidden: The hidden states.
        head: Logits and the choice.
        choices: What tokens are chosen by, and the tokens.
        vocab: Tokens that there are.
        kept: The logits that tokens are chosen by, where they are told.
    """

    device: Device
    batch: BatchBuffers
    hidden: Program
    head: Program
    choices: Choices
    vocab: int
    kept: Tensor | None = None

    def logits(self) -> npt.NDArray[np.float32]:
        """(rows, vocab_size) of the last run, of programs that tell them."""
        assert self.kept is not None
        values = np.frombuffer(self.head.read(self.kept), np.float32)
        return values.reshape(self.kept.rows, -1)[:, : self.vocab]

    def note_seen(self, place: int, ids: Sequence[int]) -> None:
        """Says which tokens a text has."""
        seen = self.choices.seen
        assert seen.storage is not None
        bits = seen_bits(ids, self.vocab)
        self.device.write(seen.storage.buffer, bits, bits.nbytes * place)

    @property
    def most_ahead(self) -> int:
        """How many tokens of each text it can compute before the host looks at them."""
        of_host = self.batch.angles or self.batch.embedded
        return 1 if of_host or not self.batch.decodes else MOST_AHEAD

    def run(
        self,
        ids: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        past: batch_encoding.IntArray,
        places: batch_encoding.IntArray,
        settings: Sequence[Settings],
        seeds: Sequence[int],
        steps: Sequence[int],
        last: int = 0,
        count: int = 1,
    ) -> list[list[int]]:
        """The next tokens of each text; ``NONE`` where a logit is not finite, and others after it.

        Args:
            ids: (batch, seq), checked.
            mask: (batch, seq).
            past: (batch, 1), tokens that came before.
            places: (batch, 1), which of the cache's texts they are of.
            settings: How each text's tokens are chosen.
            seeds: Each text's.
            steps: Tokens that each text got before.
            last: The last token's column of a prompt.
            count: How many tokens of each text, at most ``most_ahead``.
        """
        decodes = self.batch.decodes
        rows = np.arange(len(ids)) if decodes else np.array([last])
        first = past.reshape(-1) if decodes else np.zeros(len(ids), np.int64)
        words = encode_choices(settings, seeds, (np.asarray(steps) - first).tolist())
        own, chosen = self.choices.settings.storage, self.choices.chosen.storage
        assert own is not None and chosen is not None
        batch_encoding.write_batch(
            self.device, self.batch, ids, mask, rows=rows, past=past, places=places
        )
        self.device.write(own.buffer, words)
        for _ in range(count):
            self.hidden.run()
            self.head.run()
        raw = np.frombuffer(self.device.read(chosen.buffer, chosen.nbytes), np.uint32)
        at = (first[:, None] + np.arange(count)) % MOST_AHEAD
        tokens: list[list[int]] = raw.reshape(MOST_AHEAD, -1)[at, rows[:, None] * decodes].tolist()
        return tokens


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

    def from_graph(self, graph: Graph, outputs: tuple[Tensor, ...] = ()) -> Program:
        """Plans a graph and makes it ready; ``outputs`` can be read after a run."""
        with self._device.in_turn:
            return Program(self._device, make_plan(graph, outputs), self._pool)

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
            texts: How many texts; one where they are prompts.
            length: Tokens of each.
            cache: Keys, values and states.
            seen: The bits of all texts' tokens.
            told: Whether the logits can be read as well.
        """
        with self._device.in_turn:
            batch, choices, hidden, head, kept = self._layout.token_graphs(
                texts, length, cache, seen, told=told
            )
            self._fill_strips()
            first = self.from_graph(hidden)
            second = self.from_graph(head, () if kept is None else (kept,))
            vocab = self._layout.pretrained.architecture.vocab_size
            return TokenPrograms(self._device, batch, first, second, choices, vocab, kept)

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

"""A model's programs on its device, each created once: for losses, logits and new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.host_callbacks import OffloadEngine
from qlora_wgpu.graph.plan import compile_plan
from qlora_wgpu.graph.program import BufferPool, Program, submit_batched
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.model.batch_encoding import IntArray, write_batch
from qlora_wgpu.model.image_inputs import ImageInputs
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.ops.batch import INFO_LABEL_ROWS, BatchBuffers
from qlora_wgpu.ops.kv_cache import KVCache, copy_sequence, encode_copies
from qlora_wgpu.ops.sampling import (
    DECODE_STEPS_AHEAD,
    SamplerState,
    Settings,
    encode_choices,
    seen_words,
    unused_place,
)


class Choice(NamedTuple):
    """How the next token of a sequence is sampled."""

    settings: Settings
    seed: int
    step: int  # tokens generated before


@dataclass(frozen=True)
class DecodePrograms:
    """Hidden states of a batch with a KV cache, and each sequence's next token."""

    device: Device
    batch: BatchBuffers  # the inputs of the hidden states
    next: BatchBuffers  # the inputs of sampling, a token per sequence; ``batch`` in decoding
    hidden: Program
    head: Program  # logits and sampling
    choices: SamplerState  # the sampling settings, and the sampled tokens
    vocab: int  # size of the vocabulary
    kept: Tensor | None = None  # the logits that tokens are sampled from, if requested

    def logits(self) -> npt.NDArray[np.float32]:
        """(rows, vocab_size) of the last run, for programs that keep them."""
        assert self.kept is not None
        values = np.frombuffer(self.head.read(self.kept), np.float32)
        return values.reshape(self.kept.rows, -1)[:, : self.vocab]

    def _note_seen(self, place: int, ids: Sequence[int], settings: Settings) -> None:
        seen = self.choices.seen
        assert seen.storage is not None
        words = seen_words(ids, self.vocab, settings.logit_bias)
        self.device.write(seen.storage.buffer, words, words.nbytes * place)

    @property
    def samples(self) -> int:
        """How many tokens are sampled at once."""
        return self.next.batch

    @property
    def most_ahead(self) -> int:
        """How many tokens of each sequence it can compute before the host reads them."""
        of_host = self.batch.angles or self.batch.embedded
        return 1 if of_host or not self.batch.decodes else DECODE_STEPS_AHEAD

    def run(
        self,
        ids: IntArray,
        past: IntArray,
        places: IntArray,
        choices: Sequence[Choice],
        count: int = 1,
        rotated: IntArray | None = None,
    ) -> list[list[int]]:
        """The next tokens; ``NONE`` if a logit is not finite, and arbitrary ones after that.

        ``ids``, checked, ``past`` (the number of tokens before them) and ``places`` (in the cache)
        are (sequences, 1), like ``rotated``, the positions for RoPE if they differ from ``past``.
        Each sequence gets ``count`` tokens, at most ``most_ahead``.
        """
        first = past.reshape(-1)
        ones, rows = np.ones_like(ids), np.arange(len(ids))
        write_batch(
            self.device, self.batch, ids, ones, rows=rows, past=past, places=places, rotated=rotated
        )
        self._write_choices(choices, first)
        submit_batched(self.device, [self.hidden, self.head] * count)
        return self._chosen((first[:, None] + np.arange(count)) % DECODE_STEPS_AHEAD)

    def padded(self, prompts: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
        """Ids and mask of a batch of prompts."""
        ids, mask = np.zeros((2, self.batch.batch, self.batch.seq), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
        return ids, mask

    def write_prefill_inputs(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[int],
        images: ImageInputs | None = None,
    ) -> None:
        ids, mask = self.padded(prompts)
        at = np.array(places)[:, None]
        write_batch(self.device, self.batch, ids, mask, places=at, images=images)

    def end_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        places: Sequence[int],
        choices: Sequence[Choice],
    ) -> list[int]:
        """The first tokens of sequences, at most ``samples``; ``NONE`` as for ``run``.

        ``rows`` are the rows of their prompts in the prefilled batch, of which several sequences
        may have the same one.
        """
        count = len(rows)
        # Unused rows repeat the last sequence, but do not mark its token as seen.
        whole = np.minimum(np.arange(self.samples), count - 1)
        lengths = np.array([len(prompt) for prompt in prompts])
        lasts = (self.batch.seq * np.array(rows) + lengths - 1)[whole].astype(np.uint32)
        inputs, info = self.batch.storage.buffer, self.batch.info.offset
        self.device.write(inputs, lasts, self.batch.label_rows.offset)
        self.device.write(inputs, np.array([len(lasts)], np.uint32), info + 4 * INFO_LABEL_ROWS)
        none = np.zeros((self.samples, 1), np.int64)
        at = np.full_like(none, unused_place(self.choices.seen, self.vocab))
        at[:count, 0] = places
        write_batch(
            self.device, self.next, none, np.ones_like(none), rows=np.arange(len(at)), places=at
        )
        self._write_choices([choices[row] for row in whole], 0)
        for place, prompt, own in zip(places, prompts, choices, strict=True):
            self._note_seen(place, prompt, own.settings)
        self.head.run()
        return [each[0] for each in self._chosen(none)[:count]]

    def _write_choices(self, choices: Sequence[Choice], first: IntArray | int) -> None:
        own = self.choices.settings.storage
        assert own is not None
        settings, seeds, steps = zip(*choices, strict=True)
        counted = (np.asarray(steps) - first).tolist()
        self.device.write(own.buffer, encode_choices(settings, seeds, counted))

    def _chosen(self, at: IntArray) -> list[list[int]]:
        """The tokens of each sequence; ``at`` are their places among the steps ahead."""
        chosen = self.choices.chosen.storage
        assert chosen is not None
        raw = np.frombuffer(self.device.read(chosen.buffer, chosen.nbytes), np.uint32)
        tokens: list[list[int]] = raw.reshape(DECODE_STEPS_AHEAD, -1)[
            at, np.arange(len(at))[:, None]
        ].tolist()
        return tokens


@dataclass(frozen=True)
class CopyProgram:
    """Copies a sequence within a KV cache, for others with the same prompt."""

    device: Device
    copies: Tensor  # which, by ``encode_copies``
    program: Program

    def run(self, source: int, tokens: int, places: Sequence[int]) -> None:
        """Copies the first tokens of the sequence at ``source`` to other places."""
        own = self.copies.storage
        assert own is not None
        with self.device.in_turn:
            self.device.write(own.buffer, encode_copies(source, tokens, places))
            self.program.run()


@dataclass(frozen=True)
class LogitsPrograms:
    """Hidden states of a batch, and the logits of a few rows at a time."""

    device: Device
    batch: BatchBuffers
    hidden: Program
    head: Program
    logits: Tensor

    def run(
        self,
        ids: IntArray,
        mask: IntArray,
        rows: npt.NDArray[np.integer[Any]],
        past: int = 0,
        images: ImageInputs | None = None,
    ) -> npt.NDArray[np.float32]:
        """Logits (len(rows), vocab_size) of some of the batch's flattened positions.

        Ids and mask are checked; ``past`` tokens are already in the batch's cache.
        """
        count = self.logits.rows
        out = np.empty((len(rows), self.logits.columns), np.float32)
        with self.device.in_turn:
            for first in range(0, len(rows), count):
                part = rows[first : first + count]
                write_batch(self.device, self.batch, ids, mask, rows=part, past=past, images=images)
                if first == 0:
                    self.hidden.run()
                self.head.run()
                values = np.frombuffer(self.head.read(self.logits), np.float32)
                values = values.reshape(count, -1)[: len(part), : out.shape[1]]
                out[first : first + len(part)] = values
        return out


class Programs:
    """A model's programs; they share the memory of intermediates, since one runs at a time."""

    def __init__(self, plan: ModelPlan, device: Device, sharing: Programs | None = None) -> None:
        self.plan = plan
        self.device = device
        self._pool: BufferPool = BufferPool(device) if sharing is None else sharing._pool
        self._steps: dict[StepOptions, tuple[BatchBuffers, Program]] = {}

    @property
    def traffic(self) -> OffloadEngine:
        return self._pool.traffic

    def from_graph(
        self, graph: Graph, outputs: tuple[Tensor, ...] = (), *, apart: bool = False
    ) -> Program:
        """Plans a graph and creates its program; ``outputs`` can be read after a run."""
        with self.device.in_turn:
            return Program(self.device, compile_plan(graph, outputs, apart=apart), self._pool)

    def fill_kept(self) -> None:
        """Dequantizes the weights that are kept so; their codes must be uploaded already."""
        if self.plan.dequantize_plan is not None:
            with self.device.in_turn:
                Program(self.device, self.plan.dequantize_plan, self._pool).run()

    def step(self, options: StepOptions) -> tuple[BatchBuffers, Program]:
        with self.device.in_turn:
            if options not in self._steps:
                planned = self.plan.step(options)
                program = Program(self.device, planned.plan, self._pool)
                self._steps[options] = planned.batch, program
            return self._steps[options]

    def tokens(
        self,
        texts: int,
        length: int,
        cache: KVCache,
        seen: Tensor,
        *,
        samples: int = 0,
        keep_logits: bool = False,
        with_images: bool = False,
    ) -> DecodePrograms:
        """New programs that compute ``length`` tokens of some of a cache's sequences and sample.

        After a prefill, ``samples`` tokens at once, by default one of each sequence.
        """
        with self.device.in_turn:
            graphs = self.plan.token_graphs(
                texts,
                length,
                cache,
                seen,
                samples=samples,
                keep_logits=keep_logits,
                with_images=with_images,
            )
            self._fill_strips()
            kept, apart = graphs.kept, graphs.apart
            first = self.from_graph(graphs.hidden, apart=apart)
            second = self.from_graph(graphs.head, () if kept is None else (kept,), apart=apart)
            return DecodePrograms(
                self.device, graphs.batch, graphs.next, first, second, graphs.choices,
                self.plan.pretrained.architecture.vocab_size, kept,
            )  # fmt: skip

    def copies(self, cache: KVCache) -> CopyProgram:
        """Copies sequences of a cache, whose layers must be traced already."""
        graph = self.plan.new_graph()
        copies = copy_sequence(graph, cache)
        return CopyProgram(self.device, copies, self.from_graph(graph))

    def logits(self, batch: BatchBuffers) -> LogitsPrograms:
        with self.device.in_turn:
            hidden, graph, logits = self.plan.logits_graphs(batch)
            self._fill_strips()
            first = self.from_graph(hidden)
            head = self.from_graph(graph, (logits,))
            return LogitsPrograms(self.device, batch, first, head, logits)

    def _fill_strips(self) -> None:
        if self.plan.packed_weights.needs_fill:
            graph = self.plan.new_graph()
            self.plan.packed_weights.fill(graph)
            self.from_graph(graph).run()

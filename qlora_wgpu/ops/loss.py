"""The language model's loss, fused with ``lm_head``: logits exist for a chunk of rows at a time.

Only rows with a label are multiplied (the batch lists them), and the gradient with respect to
the hidden states is computed in the same pass, so no logits are kept or computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.graph import Graph, Launch
from qlora_wgpu.graph.tensor import Tensor, ceil_div, round_up
from qlora_wgpu.kernels.common import one_row, row_constants, row_workgroups
from qlora_wgpu.kernels.gemm import GEMM, PART_UNIT, Gemm
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.label_rows import scale_label_rows, scatter, transposed, weighted_total
from qlora_wgpu.ops.logits import (
    chunk_rows,
    head_group,
    head_groups,
    logits_of_rows,
    rows_of_a_block,
)
from qlora_wgpu.ops.lora_ends import LoraHead
from qlora_wgpu.ops.modules import Head, StreamedMatrix, trained_rows, trained_whole
from qlora_wgpu.ops.policy import Policy, policy_loss
from qlora_wgpu.ops.preference import Preference, preference
from qlora_wgpu.ops.score import Scoring
from qlora_wgpu.ops.tensor import fill_zero
from qlora_wgpu.ops.trained_gradients import HeadGradient, add_whole_head


@dataclass(frozen=True)
class Objective:
    """The loss: (1 - ε)·nll(target) + ε·mean of nll over the vocabulary + ζ·lse²."""

    label_smoothing: float = 0.0  # ε, as in Hugging Face's trainer (Szegedy et al., 2016)
    z_loss: float = 0.0  # ζ, which keeps the softmax's normalizer near one (Chowdhery et al., 2022)
    weighted: bool = False  # whether the micro-batch has a weight for each label row
    # Whether each row is weighted by its label's probability, as a constant (DFT, arXiv
    # 2508.05629).
    confidence: bool = False
    preference: Preference | None = None  # the objective over whole answers, if any
    policy: Policy | None = None  # the objective over sampled completions, if any
    scoring: Scoring | None = None  # the objective over whole sequences, if any

    @property
    def of_samples(self) -> Preference | Scoring | None:
        """The objective over answers or sequences, if any."""
        return self.preference or self.scoring

    @property
    def has_factors(self) -> bool:
        """Whether each label row's gradient is multiplied by a number of its own."""
        over_answers = self.preference is not None or self.policy is not None
        return self.weighted or self.confidence or over_answers

    @property
    def is_bent(self) -> bool:
        """Whether a row's loss differs from the label's negative log-likelihood."""
        return self.label_smoothing != 0.0 or self.z_loss != 0.0


PLAIN = Objective()


def label_losses(
    g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers, objective: Objective
) -> Tensor:
    """Loss of each label row and its accuracy, or with a policy its entropy, without a gradient.

    It is float32 (2 · rows of the batch), bit-identical to that of a step with the same objective.
    """
    loss = _Loss(g, hidden, head, batch, objective)
    loss.compute(None, gradient=False)
    return loss.losses


def cross_entropy(
    g: Graph,
    hidden: Tensor,
    head: Head,
    batch: BatchBuffers,
    stats: Tensor,
    *,
    gradient: bool,
    objective: Objective = PLAIN,
) -> None:
    """Adds a batch's loss, label count and correct predictions to ``stats``; starts the backward.

    The hidden states are normalized operands. Element 0 of stats gets the sum of losses, element 1
    their number, element 4 the number of labels with the largest logit, ties included. ``gradient``
    is whether d loss / d hidden is computed and added.
    """
    loss = _Loss(g, hidden, head, batch, objective)
    trained = trained_rows(head.matrix)
    gradient = gradient and (hidden.requires_grad or loss.has_own)
    if gradient and trained is not None:
        loss.of_rows = HeadGradient(g, trained, batch)
    dhidden, factors = loss.compute(stats, gradient=gradient)
    if dhidden is not None and factors is not None:
        scale_label_rows(g, dhidden, factors, batch)
    if dhidden is not None and hidden.requires_grad:
        g.add_gradient(hidden, dhidden)
    if dhidden is not None and loss.pair is not None:
        loss.pair.end(factors)
    if loss.of_rows is not None:
        loss.of_rows.add(hidden, factors)


class _Loss:
    """The loss of a batch, and its parts.

    Sums, and the gradient's parts, are computed per block of the vocabulary and added in order. A
    streamed head is uploaded in these blocks, each once per pass for all rows: the first pass, in
    reverse order, sums; the second computes the logits again. So it is bit-identical to a resident
    head, for which a launch processes many blocks at once.
    """

    def __init__(
        self, g: Graph, hidden: Tensor, head: Head, batch: BatchBuffers, objective: Objective
    ) -> None:
        self._g, self._hidden, self._head, self._batch = g, hidden, head, batch
        self._block_rows = rows_of_a_block(g, head.matrix)
        self._chunk = chunk_rows(g, head.matrix.rows, batch.rows)
        self._blocks = ceil_div(head.matrix.rows, self._block_rows)
        self._objective = objective
        self._partials = g.float_vector("sums of logits", 4 * batch.rows * self._blocks)
        self._softmax = g.float_vector("softmax", 2 * batch.rows)
        self.losses = g.float_vector("losses", 2 * batch.rows)
        self.of_rows: HeadGradient | None = None
        self.pair = LoraHead.of(g, hidden, head, batch)
        self._whole = trained_whole(head.matrix)

    @property
    def has_own(self) -> bool:
        return self.pair is not None or self._whole is not None

    def compute(
        self, stats: Tensor | None, *, gradient: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Computes the losses; returns d hidden of their sum if requested, and row factors."""
        if gradient and self.pair is not None:
            self.pair.begin()
        if isinstance(self._head.matrix, StreamedMatrix):
            self._sum_up_blocks()
            factors = None if stats is None else self.total(stats)
            return self._streamed_gradient(factors) if gradient else None, factors
        # The factors of gradients of the head's parameters depend on all losses.
        if gradient and self.has_own and self._objective.has_factors:
            self._resident(gradient=False)
            factors = None if stats is None else self.total(stats)
            return self._resident(gradient=True, sums=False, factors=factors), factors
        dhidden = self._resident(gradient=gradient)
        return dhidden, None if stats is None else self.total(stats)

    def _resident(
        self, *, gradient: bool, sums: bool = True, factors: Tensor | None = None
    ) -> Tensor | None:
        """The loss and d hidden, one chunk of rows at a time."""
        g = self._g
        dhidden = self._zeros() if gradient else None
        chunks = self._chunks(self._chunk)
        groups = head_groups(g, self._head.matrix, self._chunk) if gradient else []
        kept = [self._partials, self._softmax, self.losses, *filter(None, [dhidden])]
        if gradient and self.pair is not None:
            kept += self.pair.written
        for first, count in self._alike(chunks, kept):
            logits = self._logits(first, count)
            if sums:
                self._sum_up(logits, 0, self._blocks, first)
                self._normalize(first, count)
            if dhidden is None:
                continue
            made = self._gradient_rows(count)
            for row0, w in groups:
                self._back(logits, row0, row0, w, first, made, factors)
            self._put(made, dhidden, first)
        return dhidden

    def _sum_up_blocks(self) -> None:
        """The loss, one block of the vocabulary at a time."""
        g, batch, head = self._g, self._batch, self._head.matrix
        assert isinstance(head, StreamedMatrix)
        chunks = self._chunks(self._streamed_rows())
        for number, (row0, block) in reversed(list(enumerate(head.blocks))):
            w = head.brought(g, row0, block)
            for chunk in self._alike(chunks, [self._partials]):
                logits = self._logits(*chunk, (row0, w))
                self._sum_up(logits, number, 1, chunk[0])
        self._normalize(0, batch.rows)

    def _streamed_gradient(self, factors: Tensor | None) -> Tensor:
        """d hidden, one block of the vocabulary at a time."""
        g, head = self._g, self._head.matrix
        assert isinstance(head, StreamedMatrix)
        chunks = self._chunks(self._streamed_rows())
        made = [self._gradient_rows(count) for _, count in chunks]
        for row0, block in head.blocks:
            w = head.brought(g, row0, block)
            for chunk in self._alike(chunks, [], made, fresh=row0 == 0):
                logits = self._logits(*chunk, (row0, w))
                self._back(logits, 0, row0, w, chunk[0], made[chunks.index(chunk)], factors)
        dhidden = self._zeros()
        for (first, _), of_chunk in zip(chunks, made, strict=True):
            self._put(of_chunk, dhidden, first)
        return dhidden

    def total(self, stats: Tensor) -> Tensor | None:
        given, objective = (self._g, self.losses, self._batch, stats), self._objective
        if objective.preference is not None:
            return preference(*given, objective.preference)
        if objective.policy is not None:
            return policy_loss(*given, objective.policy)
        if objective.weighted or objective.confidence:
            return weighted_total(*given, confidence=objective.confidence)
        self._g.launch(
            "cross_entropy/total.wgsl",
            (1, 1, 1),
            {"losses": self.losses, "batch_info": self._batch.info, "stats": stats},
            constants=one_row(self._g),
        )
        return None

    # -- rows ------------------------------------------------------------------------------

    def _chunks(self, step: int) -> list[tuple[int, int]]:
        rows = self._batch.rows
        return [(first, min(step, rows - first)) for first in range(0, rows, step)]

    def _alike(
        self,
        chunks: list[tuple[int, int]],
        shared: list[Tensor],
        own: Sequence[Sequence[Tensor]] = (),
        *,
        fresh: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Yields the chunks to trace; others, of the same size, repeat these launches.

        Launches of all chunks write the ``shared`` tensors; each chunk's also its ``own``, which
        are read elsewhere and, if ``fresh``, written for the first time.
        """
        launches, size = self._g.launches, chunks[0][1]
        begin = len(launches)
        yield chunks[0]
        made: Sequence[Launch] = launches[begin:]
        written = own[0] if own else ()
        for number, chunk in enumerate(chunks[1:], 1):
            if chunk[1] != size:
                yield chunk
                continue
            tensors = {tensor: tensor for tensor in shared}
            if self.of_rows is not None:
                tensors[self.of_rows.columns] = self.of_rows.columns
            tensors |= dict(zip(written, own[number] if own else (), strict=True))
            # The second chunk has the same neighbours as any later one.
            again = self._g.repeat(
                made, tensors, {"first": chunk[0], "first_row": chunk[0]},
                stands_for_all=number > 1 and not fresh,
            )  # fmt: skip
            if not fresh:
                made, written = again, own[number] if own else ()

    def _streamed_rows(self) -> int:
        """Rows whose logits of a block exist at once.

        As many as for a resident head if that decides how sums are split, as for a pair's dB.
        """
        g, rows = self._g, self._batch.rows
        cuts_sums = g.profile.least_workgroups > 0 or self.pair is not None
        return chunk_rows(g, self._head.matrix.rows if cuts_sums else self._block_rows, rows)

    def _zeros(self) -> Tensor:
        hidden = self._hidden
        dhidden = self._g.float32(f"d {hidden.name}", hidden.rows, hidden.columns)
        fill_zero(self._g, dhidden)
        return dhidden

    def _gradient_rows(self, count: int) -> list[Tensor]:
        dchunk = self._g.float32("d hidden rows", count, self._hidden.columns)
        return [dchunk] if self.pair is None else [dchunk, self.pair.chunk(count)]

    def _put(self, made: Sequence[Tensor], dhidden: Tensor, first: int) -> None:
        scatter(self._g, made[0], dhidden, first, self._batch)
        if self.pair is not None:
            self.pair.put(made[1], first)

    # -- launches --------------------------------------------------------------------------

    def _logits(self, first: int, count: int, block: tuple[int, Tensor] | None = None) -> Tensor:
        u = None if self.pair is None else self.pair.u
        return logits_of_rows(
            self._g, self._hidden, self._head, self._batch, first, count, u, block
        )

    def _labels(self) -> dict[str, Tensor]:
        batch = self._batch
        return {"rows": batch.label_rows, "targets": batch.targets, "batch_info": batch.info}

    def _sum_up(self, logits: Tensor, number: int, count: int, first: int) -> None:
        """Sums over blocks of logits, from block ``number`` on, for rows from ``first`` on."""
        across, _, _ = row_workgroups(self._g, logits.rows)
        self._g.launch(
            "cross_entropy/sums.wgsl",
            (across, count, 1),
            {"logits": logits, **self._labels(), "partials": self._partials},
            {
                "first": first,
                "block_rows": self._block_rows,
                "block": number,
                "blocks": self._blocks,
                "vocab": self._head.matrix.rows,
            },
            {**self._losses_of(), **row_constants(self._g, self._block_rows)},
        )

    def _normalize(self, first: int, count: int) -> None:
        """Losses, accuracies and softmax normalizers of some rows."""
        self._g.launch(
            "cross_entropy/losses.wgsl",
            count,
            {
                "partials": self._partials,
                "batch_info": self._batch.info,
                "losses": self.losses,
                "softmax": self._softmax,
            },
            {
                "count": count,
                "first": first,
                "blocks": self._blocks,
                "vocab": self._head.matrix.rows,
                "smoothing": self._objective.label_smoothing,
                "z_loss": self._objective.z_loss,
            },
            self._losses_of(),
        )

    def _losses_of(self) -> dict[str, Constant]:
        """Which losses rows have, and whether their entropies take the place of accuracies."""
        given = self._objective
        entropy: dict[str, Constant] = {} if given.policy is None else {"ENTROPY": True}
        return {"OBJECTIVE": given.is_bent, **entropy}

    def _back(
        self,
        logits: Tensor,
        column: int,
        row0: int,
        w: Tensor,
        first: int,
        made: Sequence[Tensor],
        factors: Tensor | None,
    ) -> None:
        """Adds the gradient through the head's rows from ``row0`` on, in order."""
        g, head = self._g, self._head
        dlogits = g.operand("d logits", logits.rows, w.rows)
        by_row = g.profile.textures
        g.launch(
            "cross_entropy/gradient.wgsl",
            (logits.rows, 1, 1) if by_row else logits.rows * dlogits.units(8),
            {"logits": logits, **self._labels(), "softmax": self._softmax, "dlogits": dlogits},
            {
                "first": first,
                "unit0": column // 4,
                "token0": row0,
                "vocab": head.matrix.rows,
                "softcap": head.softcap or 1.0,
                "smoothing": self._objective.label_smoothing,
            },
            {
                "SOFTCAP": head.softcap is not None,
                "OBJECTIVE": self._objective.is_bent,
                "BY_ROW": by_row,
                **({"THREADS": g.profile.threads_per_row} if by_row else {}),
            },
        )
        if self.of_rows is not None:
            self.of_rows.take(dlogits, row0, first, head.scale)
        grouped = head_group(g, self._chunk) > 1
        part = round_up(self._block_rows, PART_UNIT) if grouped else 0
        if self.pair is not None:
            turned = transposed(g, dlogits, first, self._batch, factors)
            self.pair.take(dlogits, turned, row0, first, made[1], part)
        if self._whole is not None:
            given = dlogits, row0, first, self._batch, head.scale, factors
            add_whole_head(g, self._whole, self._hidden, *given)
        product = Gemm(
            dlogits, w, made[0], False, scale=head.scale, accumulate=row0 > 0, part=part,
            batch_info=self._batch.info, first_row=first, label="lm_head/backward",
        )  # fmt: skip
        GEMM.launch(g, product)

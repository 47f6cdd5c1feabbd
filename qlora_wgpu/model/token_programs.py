"""Programs that choose the next tokens of texts, after their prompts and after each new token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.in_turn import run_in_turn
from qlora_wgpu.graph.program import Program
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.ops.batch import BatchBuffers
from qlora_wgpu.ops.sampling import MOST_AHEAD, Choices, Settings, encode_choices, seen_words


@dataclass(frozen=True)
class TokenPrograms:
    """Hidden states of a batch with a cache, and from them each text's next token.

    Attributes:
        device: Where they run.
        batch: Their inputs.
        next: What the choice reads of each text, a token of each; of new tokens it is ``batch``.
        hidden: The hidden states.
        head: Logits and the choice.
        choices: What tokens are chosen by, and the tokens.
        vocab: Tokens that there are.
        kept: The logits that tokens are chosen by, where they are told.
    """

    device: Device
    batch: BatchBuffers
    next: BatchBuffers
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

    def _note_seen(self, place: int, ids: Sequence[int], settings: Settings) -> None:
        """Says which tokens a text has, and which are biased."""
        seen = self.choices.seen
        assert seen.storage is not None
        words = seen_words(ids, self.vocab, settings.logit_bias)
        self.device.write(seen.storage.buffer, words, words.nbytes * place)

    @property
    def most_ahead(self) -> int:
        """How many tokens of each text it can compute before the host looks at them."""
        of_host = self.batch.angles or self.batch.embedded
        return 1 if of_host or not self.batch.decodes else MOST_AHEAD

    def run(
        self,
        ids: batch_encoding.IntArray,
        past: batch_encoding.IntArray,
        places: batch_encoding.IntArray,
        settings: Sequence[Settings],
        seeds: Sequence[int],
        steps: Sequence[int],
        count: int = 1,
    ) -> list[list[int]]:
        """The tokens after new ones; ``NONE`` where a logit is not finite, and others after it.

        Args:
            ids: (texts, 1), checked.
            past: (texts, 1), tokens that came before.
            places: (texts, 1), which of the cache's texts they are of.
            settings: How each text's tokens are chosen.
            seeds: Each text's.
            steps: Tokens that each text got before.
            count: How many tokens of each text, at most ``most_ahead``.
        """
        first = past.reshape(-1)
        self._write(self.batch, ids, np.ones_like(ids), np.arange(len(ids)), past, places)
        self._settle(settings, seeds, (np.asarray(steps) - first).tolist())
        run_in_turn(self.device, [self.hidden, self.head] * count)
        return self._chosen((first[:, None] + np.arange(count)) % MOST_AHEAD)

    def begin_prompts(self, prompts: Sequence[Sequence[int]], places: Sequence[int]) -> None:
        """Writes prompts for ``hidden``, which keeps their keys and values.

        Args:
            prompts: As many as the batch has rows, checked, none longer than a row.
            places: Which of the cache's texts they are of.
        """
        count, length = self.batch.batch, self.batch.seq
        ids, mask = np.zeros((2, count, length), np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
        lasts = length * np.arange(count) + mask.sum(axis=1) - 1
        none = np.zeros((count, 1), np.int64)
        self._write(self.batch, ids, mask, lasts, none, np.array(places)[:, None])

    def end_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        places: Sequence[int],
        settings: Sequence[Settings],
        seeds: Sequence[int],
        steps: Sequence[int],
    ) -> list[int]:
        """The tokens after prompts that were computed; ``NONE`` as of ``run``.

        Args:
            prompts: Those prompts.
            places: Which of the cache's texts they are of.
            settings: How each text's tokens are chosen.
            seeds: Each text's.
            steps: Tokens of each prompt that were chosen before.
        """
        none = np.zeros((len(prompts), 1), np.int64)
        at = np.array(places)[:, None]
        self._write(self.next, none, np.ones_like(none), np.arange(len(prompts)), none, at)
        self._settle(settings, seeds, steps)
        for place, prompt, own in zip(places, prompts, settings, strict=True):
            self._note_seen(place, prompt, own)
        self.head.run()
        return [each[0] for each in self._chosen(none)]

    def _write(
        self,
        batch: BatchBuffers,
        ids: batch_encoding.IntArray,
        mask: batch_encoding.IntArray,
        rows: batch_encoding.IntArray,
        past: batch_encoding.IntArray,
        places: batch_encoding.IntArray,
    ) -> None:
        batch_encoding.write_batch(
            self.device, batch, ids, mask, rows=rows, past=past, places=places
        )

    def _settle(
        self, settings: Sequence[Settings], seeds: Sequence[int], steps: Sequence[int]
    ) -> None:
        """Writes what tokens are chosen by."""
        own = self.choices.settings.storage
        assert own is not None
        self.device.write(own.buffer, encode_choices(settings, seeds, steps))

    def _chosen(self, at: batch_encoding.IntArray) -> list[list[int]]:
        """The tokens of each text, (texts, ·): where they lie among those that may be ahead."""
        chosen = self.choices.chosen.storage
        assert chosen is not None
        raw = np.frombuffer(self.device.read(chosen.buffer, chosen.nbytes), np.uint32)
        tokens: list[list[int]] = raw.reshape(MOST_AHEAD, -1)[
            at, np.arange(len(at))[:, None]
        ].tolist()
        return tokens

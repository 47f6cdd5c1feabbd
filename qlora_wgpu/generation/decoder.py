"""A text that grows: the prompt is computed once, then every token by itself."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import bucket_length
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.programs import LogitsPrograms, Programs
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache

FloatArray = npt.NDArray[np.float32]


class Decoder:
    """Next-token logits for one text of bounded length, with keys and values kept on the device.

    They are those of the text so far by itself. Where its length changes how it is rotated, or the
    adapter changes, the keys of its tokens change, too, and it is computed anew.
    """

    def __init__(self, model: QLoRAModel, capacity: int) -> None:
        """Allocates nothing yet.

        Args:
            model: Base and adapter, as they are at each call.
            capacity: Most tokens of the text, prompt included.
        """
        self._model = model
        self._cache = KVCache(capacity)
        self._programs: WeakKeyDictionary[Programs, dict[int, LogitsPrograms]]
        self._programs = WeakKeyDictionary()
        self._ids: list[int] = []
        self._rotated_length = 0
        self._version = model.parameters_version

    @property
    def capacity(self) -> int:
        """Most tokens of the text."""
        return self._cache.capacity

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self._ids)

    def start(self, prompt_ids: Sequence[int]) -> FloatArray:
        """Begins a new text; float32 logits (vocab_size) of the token after it.

        Raises:
            ShapeError: If it is empty or does not fit, or an id is outside the vocabulary.
        """
        ids = np.asarray(prompt_ids, np.int64)
        if not 0 < len(ids) <= self.capacity:
            raise ShapeError(f"a prompt of {len(ids)} tokens does not fit {self.capacity}")
        length = max(bucket_length(len(ids), self.capacity), 2)
        row, mask = np.zeros((2, 1, length), np.int64)
        row[0, : len(ids)], mask[0, : len(ids)] = ids, 1
        self._version = self._model.parameters_version
        logits = self._logits(row, mask, len(ids) - 1, past=0)
        self._ids = ids.tolist()
        self._rotated_length = len(ids)
        return logits

    def step(self, token: int) -> FloatArray:
        """Appends a token; float32 logits (vocab_size) of the one after it.

        Raises:
            ShapeError: If the text is full.
        """
        if self.length >= self.capacity:
            raise ShapeError(f"the text is full: it holds {self.capacity} tokens")
        if self._turns(self.length + 1) or self._version != self._model.parameters_version:
            return self.start([*self._ids, token])
        row = np.array([[token]])
        logits = self._logits(row, np.ones_like(row), 0, past=self.length)
        self._ids.append(token)
        return logits

    def _turns(self, length: int) -> bool:
        """Whether a text of this length is rotated in another way than the keys that are kept."""
        made = [program for each in self._programs.values() for program in each.values()]
        rotations = {r for program in made for r in program.batch.angles}
        return not all(rotation.is_same(length, self._rotated_length) for rotation in rotations)

    def _logits(
        self,
        row: npt.NDArray[np.int64],
        mask: npt.NDArray[np.int64],
        column: int,
        past: int,
    ) -> FloatArray:
        """Logits of one column of a batch of one row."""
        ids = batch_encoding.checked_ids(row, self._model.architecture.vocab_size)
        length = ids.shape[1]
        # An adapter of another shape has programs of its own, over the same cache.
        made = self._programs.setdefault(self._model.programs, {})
        if length not in made:
            batch = make_batch_buffers(1, length, CacheView(self._cache))
            made[length] = self._model.programs.logits(batch)
        logits = made[length].run(ids, mask, np.array([column]), past)
        return np.ascontiguousarray(logits[0])

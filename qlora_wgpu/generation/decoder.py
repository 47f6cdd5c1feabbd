"""A text that grows: the prompt is computed once, then every token by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qlora_wgpu.data import bucket_length
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.model import batch_encoding
from qlora_wgpu.model.programs import LogitsPrograms
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache

FloatArray = npt.NDArray[np.float32]


class Decoder:
    """Next-token logits for one text of bounded length, with keys and values kept on the device."""

    def __init__(self, model: QLoRAModel, capacity: int) -> None:
        """Allocates nothing yet.

        Args:
            model: Base and adapter, as they are at each call.
            capacity: Most tokens of the text, prompt included.
        """
        self._model = model
        self._cache = KVCache(capacity)
        self._programs: dict[int, LogitsPrograms] = {}
        self.length = 0

    @property
    def capacity(self) -> int:
        """Most tokens of the text."""
        return self._cache.capacity

    def start(self, prompt_ids: Sequence[int]) -> FloatArray:
        """Begins a new text; float32 logits (vocab_size) of the token after it.

        Raises:
            ShapeError: If it is empty or does not fit, or an id is outside the vocabulary.
        """
        ids = np.asarray(prompt_ids, np.int64)
        if not 0 < len(ids) <= self.capacity:
            raise ShapeError(f"a prompt of {len(ids)} tokens does not fit {self.capacity}")
        length = max(bucket_length(len(ids), self.capacity), 2)
        row = np.zeros((1, length), np.int64)
        row[0, : len(ids)] = ids
        logits = self._logits(row, len(ids) - 1, past=0)
        self.length = len(ids)
        return logits

    def step(self, token: int) -> FloatArray:
        """Appends a token; float32 logits (vocab_size) of the one after it.

        Raises:
            ShapeError: If the text is full.
        """
        if self.length >= self.capacity:
            raise ShapeError(f"the text is full: it holds {self.capacity} tokens")
        logits = self._logits(np.array([[token]]), 0, past=self.length)
        self.length += 1
        return logits

    def _logits(self, row: npt.NDArray[np.int64], column: int, past: int) -> FloatArray:
        """Logits of one column of a batch of one row."""
        ids = batch_encoding.checked_ids(row, self._model.architecture.vocab_size)
        length = ids.shape[1]
        if length not in self._programs:
            batch = make_batch_buffers(1, length, CacheView(self._cache))
            self._programs[length] = self._model.programs.logits(batch)
        logits = self._programs[length].run(ids, np.ones_like(ids), np.array([column]), past)
        return np.ascontiguousarray(logits[0])

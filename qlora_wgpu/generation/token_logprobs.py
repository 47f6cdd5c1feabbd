"""How likely a model found a token, and which others it found likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities by the model's own logits, before penalties, temperature and the like.

    Attributes:
        logprob: The chosen token's.
        top: The likeliest tokens and theirs, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: npt.NDArray[np.floating[Any]], token: int, count: int) -> TokenLogprobs:
        """Those of a token, and of so many of the likeliest.

        Args:
            logits: (vocab_size).
            token: The chosen one.
            count: How many others are told.
        """
        exact = logits.astype(np.float64)
        largest = exact.max()
        exact -= largest + np.log(np.exp(exact - largest).sum())
        count = min(count, len(exact))
        likeliest = np.argpartition(-exact, count - 1)[:count] if count else np.array([], np.int64)
        # Of equals the first comes first, as in the device's choice.
        ordered = sorted(likeliest.tolist(), key=lambda i: (-exact[i], i))
        return cls(float(exact[token]), tuple((i, float(exact[i])) for i in ordered))

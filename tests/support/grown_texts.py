"""Texts that an engine writes, with what the model says of every token."""

import numpy as np

from qlora_wgpu.generation import Engine
from qlora_wgpu.generation.sampling import Sampling


def grown(model, prompt, count, capacity=64, sampling=None):
    """Tokens after a prompt, drawn so that they differ, and log probabilities (count, vocab)."""
    return written(Engine(model, 1, capacity), model, prompt, count, sampling)


def written(engine, model, prompt, count, sampling=None):
    """The same of an engine that there is."""
    vocab, sampling = model.architecture.vocab_size, sampling or Sampling(temperature=1.0)
    text = engine.add(prompt, sampling, max_new_tokens=count, logprobs=vocab)
    ids, rows = list(text), np.empty((count, vocab))
    for row, told in zip(rows, text.token_logprobs, strict=True):
        for token, value in told.top:
            row[token] = value
    return ids, rows


def log_probabilities(logits):
    """Those of logits (rows, vocab)."""
    exact = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    return exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))

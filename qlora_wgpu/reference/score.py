"""Losses over the scores of whole sequences: reward models' and classifiers'."""

import numpy as np

from qlora_wgpu.reference.loss import Indices
from qlora_wgpu.reference.preference import log_sigmoid
from qlora_wgpu.reference.tape import Array


def scores(hidden: Array, head: Array, rows: Indices) -> Array:
    """(sequences, classes), of hidden (tokens, columns), head (classes, columns)."""
    return hidden[rows] @ head.T


def pairs(z: Array, margins: Array, center: float) -> Array:
    """Bradley-Terry's loss of scores z (2 · pairs, 1), chosen before rejected."""
    chosen, rejected = z[::2, 0], z[1::2, 0]
    return center * (chosen + rejected) ** 2 - log_sigmoid(chosen - rejected - margins)


def single_label(z: Array, labels: Indices, weights: Array) -> Array:
    """Weighted cross-entropy of scores z (sequences, classes)."""
    top = np.max(z, axis=1, keepdims=True)
    lse = top[:, 0] + np.log(np.sum(np.exp(z - top), axis=1))
    return weights[labels] * (lse - z[np.arange(len(labels)), labels])


def multi_label(z: Array, targets: Array) -> Array:
    """Binary cross-entropy, averaged over the classes."""
    return -np.mean(targets * log_sigmoid(z) + (1 - targets) * log_sigmoid(-z), axis=1)


def regression(z: Array, targets: Array) -> Array:
    """The squared error, averaged over the classes."""
    return np.mean((z - targets) ** 2, axis=1)

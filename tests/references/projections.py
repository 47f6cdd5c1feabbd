"""A few numbers of a large array that tell how far another one is from it."""

import zlib

import numpy as np

COUNT = 8


def projections(name, array):
    """(COUNT,) products with random directions that follow from the name.

    Those of a difference are normal, with its norm as their standard deviation.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    flat = np.asarray(array, np.float64).ravel()
    return np.array([random.standard_normal(flat.size) @ flat for _ in range(COUNT)])


def distance(ours, theirs):
    """About the norm of the difference of two arrays, by their projections."""
    return float(np.sqrt(np.mean((ours - theirs) ** 2)))


def whole_projections(arrays):
    """(COUNT,) of all arrays together."""
    return sum(projections(name, arrays[name]) for name in sorted(arrays))

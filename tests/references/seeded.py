"""Weights, adapters and batches that follow from names alone, so that no file has to hold them."""

import zlib

import numpy as np

VOCAB = 331


def _normal(name, shape):
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return random.standard_normal(shape, dtype=np.float32)


def norm_offset(model_type):
    """What a family adds to the stored weights of its norms."""
    if "gemma" in model_type:
        return 0.0 if "gemma4" in model_type or "gemma3n" in model_type else 1.0
    if model_type == "nemotron_h":
        return 0.0
    if model_type == "muse_glimmer":
        return 1.0
    offset = ("nemotron", "qwen3_next", "qwen3_5")
    return 1.0 if model_type.startswith(offset) else 0.0


def weights(shapes, norm_offset):
    """float32 arrays by name; every norm and bias is perturbed, so that each detail shows."""
    arrays = {}
    for name, shape in shapes.items():
        array = _normal(name, shape)
        if len(shape) == 1 or "norm" in name:
            centre = 1.0 - norm_offset if "norm" in name and name.endswith("weight") else 0.0
            centre = 1.0 if name.endswith(("scalar", "scale")) else centre
            arrays[name] = np.float32(centre) + np.float32(0.2) * array
        elif "modality_router" in name:  # the mean of whose products counts, not their sum
            arrays[name] = np.float32(5.0) * array
        elif name.endswith(("_min", "_max")):  # bounds on both sides of zero
            arrays[name] = (0.5 + np.abs(array)) * np.float32(1 if name.endswith("max") else -1)
        else:
            arrays[name] = np.float32(0.5 if "embed" in name else 0.15) * array
    return {name: np.asarray(array) for name, array in arrays.items()}


def adapter(shapes):
    """A and B by PEFT's names; B is not zero, and DoRA's magnitudes are about one."""
    return {
        name: np.float32(name.endswith("magnitude_vector")) + np.float32(0.2) * _normal(name, shape)
        for name, shape in shapes.items()
    }


def marks(array):
    """Sums that tell a matrix from another: of its values, their squares, and by their places."""
    values = array.astype(np.float64).ravel()
    return np.array([values.sum(), (values**2).sum(), values @ np.arange(values.size)])


def samples(lengths=(7, 21, 16, 17, 23)):
    """Ids of samples on both sides of 16 tokens."""
    random = np.random.default_rng(6)
    return [random.integers(0, VOCAB, length) for length in lengths]


def batch(seq=24):
    """Ids, mask and labels: row 1 is padded at its end, row 2 has nothing to learn."""
    random = np.random.default_rng(5)
    ids = random.integers(0, VOCAB, (3, seq))
    mask = np.ones_like(ids)
    mask[1, -5:] = 0
    labels = np.where(mask == 1, ids, -100)
    labels[0, :6] = -100
    labels[2] = -100
    return ids, mask, labels


def separated_weight():
    """(72, 100) float32, each singular value 0.6 of the one before."""
    rng = np.random.default_rng(31)
    u, v = (np.linalg.qr(rng.standard_normal((n, 72)))[0] for n in (72, 100))
    return ((u * 0.6 ** np.arange(72)) @ v.T).astype(np.float32)

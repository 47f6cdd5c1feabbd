"""Files that are written tensor by tensor: the library's, in little memory."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from qlora_wgpu.checkpoint import write_safetensors

NARROW = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
KINDS = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "ä": 'x"y', "init": "z"}])
def test_the_bytes_are_the_librarys(tmp_path, metadata):
    rng = np.random.default_rng(0)
    kinds = KINDS if metadata else [*NARROW, *KINDS]  # which the library writes, but cannot read
    tensors = {f"{n % 3}.ä{n}": rng.integers(0, 2, (3, n)).astype(k) for n, k in enumerate(kinds)}
    wide = rng.standard_normal((5, 16)).astype(np.float32)
    tensors |= {"view": wide[:, :7], "vector": wide[1], "number": np.float64(2.0)}
    write_safetensors(tmp_path / "ours", tensors, metadata)
    contiguous = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    whole = safetensors.numpy.save(contiguous, {"format": "pt"})
    ours = (tmp_path / "ours").read_bytes()
    if metadata is None:
        assert ours == whole
        return
    # The library has metadata in another order each time.
    read = safetensors.numpy.load(ours)
    assert read.keys() == tensors.keys()
    assert all(np.array_equal(read[name], tensors[name]) for name in read)
    assert ours.index(b'"format"') < ours.index(b'"init"') < ours.index("ä".encode())


def test_no_more_than_two_tensors_are_in_memory_beside(tmp_path):
    whole = np.ones((64, 4096), np.float32)
    views = {f"{n}": whole[:, 512 * n : 512 * n + 500] for n in range(8)}
    tracemalloc.start()
    write_safetensors(tmp_path / "file", views)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.2 * views["0"].nbytes  # the one that is made, and the one before

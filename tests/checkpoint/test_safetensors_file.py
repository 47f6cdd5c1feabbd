"""Reading safetensors: every type, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from qlora_wgpu.checkpoint import SafetensorsFile, write_safetensors
from qlora_wgpu.errors import CheckpointError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with any header at all: an object, JSON text or raw bytes."""
    if not isinstance(header, (str, bytes)):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def refused(path: Path) -> str:
    """The one sentence that says why."""
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message[len(str(path)) :].lstrip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    "dtype", ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
)
def test_reads_what_safetensors_writes(path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.integers(0, 100, (3, 5)).astype(dtype),
        "scalar": np.array(7).astype(dtype),
        "empty": np.zeros((0, 4), dtype),
        "odd": rng.integers(0, 2, 3).astype(dtype),
    }
    path.write_bytes(safetensors.numpy.save(arrays))
    with SafetensorsFile(path) as file:
        assert sorted(file.names()) == sorted(arrays)
        for name, array in arrays.items():
            read = file.raw(name)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert file.shape(name) == array.shape
            assert read.tobytes() == array.tobytes()


def test_names_shapes_and_membership(path: Path) -> None:
    write_safetensors(path, {"b": np.zeros((2, 3), np.float32), "a": np.zeros(4, np.float16)})
    file = SafetensorsFile(path)
    assert set(file.names()) == {"a", "b"}
    assert file.shape("b") == (2, 3)
    assert (file.dtype("a"), file.dtype("b")) == ("F16", "F32")
    assert "a" in file
    assert "c" not in file


def test_metadata(path: Path) -> None:
    write_safetensors(path, {"x": np.zeros(1, np.float32)}, {"step": "3"})
    assert SafetensorsFile(path).metadata == {"step": "3"}
    assert "__metadata__" not in SafetensorsFile(path).names()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_float32_of_floats(path: Path, dtype: str) -> None:
    values = np.array([[0.0, -0.0, 1.5, -2.25], [6e-8, 65504, np.inf, -np.inf]]).astype(dtype)
    write_safetensors(path, {"x": values})
    read = SafetensorsFile(path).float32("x")
    assert read.dtype == np.float32
    assert read.tobytes() == values.astype(np.float32).tobytes()


def test_float32_of_every_bfloat16(path: Path) -> None:
    """A bfloat16 is the upper half of a float32: all 65,536 of them, NaNs included."""
    bits = np.arange(65536, dtype=np.uint16)
    header = {"x": {"dtype": "BF16", "shape": [256, 256], "data_offsets": [0, 131072]}}
    write(path, header, bits.tobytes())
    file = SafetensorsFile(path)
    assert file.raw("x").dtype == np.uint16
    assert file.raw("x").tobytes() == bits.tobytes()
    read = file.float32("x")
    assert (read.dtype, read.shape) == (np.float32, (256, 256))
    assert (read.reshape(-1).view(np.uint32) == bits.astype(np.uint32) << 16).all()
    assert read[0x3F, 0x80] == 1.0
    assert read[0xC0, 0x00] == -2.0


def test_float32_is_the_callers_own_and_raw_is_read_only(path: Path) -> None:
    write_safetensors(path, {"x": np.ones(3, np.float32)})
    file = SafetensorsFile(path)
    file.float32("x")[:] = 5
    assert file.float32("x").tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        file.raw("x")[0] = 5


def test_an_array_outlives_its_file(path: Path) -> None:
    write_safetensors(path, {"x": np.arange(1000, dtype=np.float32)})
    with SafetensorsFile(path) as file:
        view, array = file.raw("x"), file.float32("x")
    path.unlink()
    assert view[999] == array[999] == 999
    with pytest.raises(ValueError, match="closed"):
        file.raw("x")


def test_data_that_is_not_aligned(path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    write(path, header, b"\x07" + np.array([1.5, 2.5], np.float32).tobytes())
    assert SafetensorsFile(path).float32("b").tolist() == [1.5, 2.5]


def test_only_the_tensor_asked_for_takes_memory(path: Path) -> None:
    big = np.ones((1024, 1024), np.float16)
    write_safetensors(path, {"big": big, "small": np.ones(4, np.float32)})
    tracemalloc.start()
    file = SafetensorsFile(path)
    file.float32("small")
    opened = tracemalloc.get_traced_memory()[1]
    read = file.float32("big")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert opened < 100_000
    assert peak < read.nbytes + 100_000


def test_a_file_without_tensors(path: Path) -> None:
    assert SafetensorsFile(write(path, {})).names() == []
    assert SafetensorsFile(write(path, {"__metadata__": {"a": "b"}})).names() == []
    empty = json.dumps({"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    for length in (len(empty), 4096 - 8):  # the latter ends with a page, so nothing can be mapped
        assert SafetensorsFile(write(path, empty.ljust(length))).float32("x").shape == (0,)


def test_padding_after_the_header_is_allowed(path: Path) -> None:
    write(path, json.dumps({"x": F32}) + "     ", bytes(8))
    assert SafetensorsFile(path).float32("x").tolist() == [0, 0]


def test_a_missing_tensor_names_the_nearest(path: Path) -> None:
    write_safetensors(
        path, {"layers.0.q_proj.weight": np.ones(1), "layers.0.q_proj.bias": np.ones(1)}
    )
    file = SafetensorsFile(path)
    for ask in (file.shape, file.dtype, file.raw, file.float32):
        with pytest.raises(CheckpointError) as caught:
            ask("layers.0.q_prj.weight")
        assert str(caught.value) == (
            f"{path} has no tensor 'layers.0.q_prj.weight'; did you mean 'layers.0.q_proj.weight'?"
        )


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "i8"])
def test_float32_of_what_are_no_floats(path: Path, dtype: str) -> None:
    write_safetensors(path, {"x": np.ones(3, dtype)})
    with pytest.raises(CheckpointError, match=r"'x' has dtype .*, but weights must be F32, F16, "):
        SafetensorsFile(path).float32("x")


def test_elements_smaller_than_a_byte(path: Path) -> None:
    write(path, {"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3))
    file = SafetensorsFile(path)
    assert file.shape("x") == (2, 3)
    with pytest.raises(CheckpointError, match="F4"):
        file.raw("x")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "nothing.safetensors")
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"abc", "has only 3 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>...", "is a web page"),
        (b"\n  <html lang='en'>", "is a web page"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x08 archive/data.pkl", "PyTorch"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "pickle"),
        (b"GGUF\x03\x00\x00\x00\x23\x01\x00", "GGUF"),
        (bytes(range(128, 256)), "not a safetensors file: its header would have"),
        (b"\xff" * 100, "not a safetensors file: its header would have"),
        (struct.pack("<Q", 16 * 2**20 + 1) + bytes(99), "more than the 16777216 allowed"),
        (struct.pack("<Q", 0), "header is not JSON"),
        (struct.pack("<Q", 4) + b"null", "is not a JSON object"),
    ],
)
def test_files_that_are_something_else(path: Path, content: bytes, expected: str) -> None:
    path.write_bytes(content)
    assert expected in refused(path)


def test_a_length_that_looks_like_a_web_page_is_no_web_page(path: Path) -> None:
    text = json.dumps({"x": F32})
    for length in (ord("<"), ord("<") + 256 * ord("a")):
        write(path, text + " " * (length - len(text)), bytes(8))
        assert SafetensorsFile(path).names() == ["x"]


@pytest.mark.quick(cut=[0, 7, 203, 399])
@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_every_truncation_is_found(path: Path, cut: int) -> None:
    write_safetensors(path, {"a": np.ones((4, 8), np.float32), "b": np.ones(30, np.float32)})
    content = path.read_bytes()
    assert len(content) > 400
    path.write_bytes(content[:cut])
    message = refused(path)
    assert message.startswith(
        ("is truncated", "is empty", "is not a safetensors file: it has only")
    )


def test_truncation_says_how_much_is_missing(path: Path) -> None:
    write_safetensors(path, {"a": np.ones(100, np.float32)})
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    size = len(content)
    assert f"expected {size} bytes, got {size - 1}" in refused(path)


def test_bytes_after_the_end_are_found(path: Path) -> None:
    write_safetensors(path, {"a": np.ones(100, np.float32)})
    path.write_bytes(path.read_bytes() + b"xyz")
    assert "last 3 bytes belong to no tensor" in refused(path)


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b'{"x": \xff}', "not UTF-8 at byte 14"),
        ('{"x": ', "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"x": 1' + "0" * 5000 + "}", "not JSON"),
        ('{"x": {}, "x": {}}', "lists 'x' twice"),
        ('{"x": {"dtype": "F32", "dtype": "F32"}}', "lists 'dtype' twice"),
        ({"x": 3}, "'x' must have dtype, shape and data_offsets"),
        ({"x": {"dtype": "F32", "shape": [2]}}, "'x' must have dtype, shape and data_offsets"),
        ({"x": entry("F33")}, "unknown dtype 'F33'"),
        ({"x": entry("float32")}, "unknown dtype 'float32'"),
        ({"x": entry(None)}, "unknown dtype None"),
        ({"x": entry([])}, "unknown dtype []"),
        ({"x": entry(shape=2)}, "has shape 2"),
        ({"x": entry(shape=[-2])}, "has shape [-2]"),
        ({"x": entry(shape=[2.0])}, "has shape [2.0]"),
        ({"x": entry(shape=[True, 2])}, "has shape [True, 2]"),
        ({"x": entry(shape=["2"])}, "has shape ['2']"),
        ({"x": entry(shape=[2**63])}, "has shape"),
        ({"x": entry(shape=[1] * 33 + [2])}, "has shape"),
        ({"x": entry(shape=[2**62, 2**62])}, "needs"),
        ({"x": entry(shape=[3])}, "needs 12 bytes, but its data_offsets give it 8"),
        ({"x": entry("F16")}, "needs 4 bytes"),
        ({"x": entry("F4", [1])}, "needs 1 bytes"),
        ({"x": entry(offsets=[8, 0])}, "data_offsets [8, 0]"),
        ({"x": entry(offsets=[-8, 0])}, "data_offsets [-8, 0]"),
        ({"x": entry(offsets=[0])}, "data_offsets [0]"),
        ({"x": entry(offsets=[0, 8, 16])}, "data_offsets [0, 8, 16]"),
        ({"x": entry(offsets=[0.0, 8.0])}, "data_offsets [0.0, 8.0]"),
        ({"x": entry(offsets=None)}, "data_offsets None"),
        ({"x": entry(offsets=[2**62, 2**62 + 8])}, "before tensor 'x' belong to no"),
        ({"x": entry(offsets=[4, 12])}, "4 bytes before tensor 'x' belong to no"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "'x' and 'y' overlap"),
        ({"x": entry(), "y": entry()}, "'x' and 'y' overlap"),
        ({"x": entry(), "y": entry(offsets=[9, 17])}, "1 bytes before tensor 'y' belong to no"),
        ({"x": entry(), "y": entry(offsets=[8, 16])}, "is truncated"),
        ({"x": entry(shape=[1], offsets=[0, 4])}, "last 4 bytes belong to no tensor"),
        ({"__metadata__": 3, "x": entry()}, "metadata is not a map of strings"),
        ({"__metadata__": {"a": 3}, "x": entry()}, "metadata is not a map of strings"),
    ],
)
def test_damaged_headers(path: Path, header: Any, expected: str) -> None:
    write(path, header, bytes(8))
    assert expected in refused(path)


def test_names_that_cannot_be_printed_are_escaped(path: Path) -> None:
    write(path, '{"a\\ud800\\n": 3}')
    refused(path).encode()
    write(path, '{"a\\ud800\\n": {"dtype": "F33", "shape": [0], "data_offsets": [0, 0]}}')
    refused(path).encode()


@pytest.mark.slow
def test_more_tensors_than_allowed(path: Path) -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    write(path, {str(i): empty for i in range(100_000)})
    assert len(SafetensorsFile(path).names()) == 100_000
    write(path, {str(i): empty for i in range(100_001)})
    assert "100001 tensors, more than the 100000 allowed" in refused(path)


@pytest.mark.slow
def test_random_damage_never_escapes_as_another_error(path: Path) -> None:
    """Flipped bytes in the header are refused, or change a name or a number and nothing more."""
    write_safetensors(path, {"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16)})
    content = bytearray(path.read_bytes())
    header = int.from_bytes(content[:8], "little") + 8
    rng = np.random.default_rng(0)
    for _ in range(2000):
        damaged = content.copy()
        for place in rng.integers(0, header, rng.integers(1, 4)):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            with SafetensorsFile(path) as file:
                assert sum(file.raw(name).nbytes for name in file.names()) == len(content) - header
        except CheckpointError as err:
            assert "\n" not in str(err)


@pytest.mark.parametrize(
    "header",
    [
        '{"a\\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-0, 8]}}',
        '{"__metadata__": {"a": "\\ud800"}, "x": ' + json.dumps(F32) + "}",
        '{"x": {"dtype": "F32", "shape": [4294967296, 4294967296, 0], "data_offsets": [0, 0]}, '
        '"y": ' + json.dumps(F32) + "}",
    ],
)
def test_what_the_safetensors_library_refuses_is_refused(path: Path, header: str) -> None:
    write(path, header, bytes(8))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "numpy")
    assert refused(path).startswith("is damaged")


@pytest.mark.parametrize(
    "header",
    [
        {"x": F32 | {"more": 1}},
        {"x": ["F32", [2], [0, 8]]},
        {"__metadata__": None, "x": F32},
        '{"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "x": '
        + json.dumps(F32)
        + "}",
        {"x": F32, "y": {"dtype": "U8", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}},
        {"x": F32, "y": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}},
    ],
)
def test_what_the_safetensors_library_takes_is_taken(path: Path, header: Any) -> None:
    write(path, header, np.array([1.5, 2.5], np.float32).tobytes())
    with safetensors.safe_open(path, "numpy") as theirs:
        names = set(theirs.keys())
    file = SafetensorsFile(path)
    assert set(file.names()) == names
    assert file.float32("x").tolist() == [1.5, 2.5]
    if "y" in names:
        with pytest.raises(CheckpointError, match=r"'y' has shape .* which NumPy does not support"):
            file.raw("y")

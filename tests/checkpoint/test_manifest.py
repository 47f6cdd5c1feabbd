"""A folder with a manifest is what was written, byte for byte, or it is refused."""

import json

import pytest
from support.pipes import make_pipe

from qlora_wgpu.checkpoint import MANIFEST, read_manifest, write_manifest
from qlora_wgpu.errors import CheckpointError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-3"
    path.mkdir()
    (path / "a").write_bytes(bytes(range(200)))
    (path / "b").write_bytes(b"")
    write_manifest(path, {"step": 3, "settings": {"lora.r": 4, "rate": 1e-3, "null": None}})
    return path


def test_what_was_written_is_read(folder):
    manifest = read_manifest(folder)
    assert manifest["step"] == 3
    assert manifest["settings"] == {"lora.r": 4, "rate": 1e-3, "null": None}
    assert {n: f["size"] for n, f in manifest["files"].items()} == {"a": 200, "b": 0}


@pytest.mark.parametrize("name", ["a", MANIFEST])
def test_every_bit_counts(folder, name):
    whole = (folder / name).read_bytes()
    for position in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[position] ^= 1
        if name == MANIFEST and _same_json(flipped, whole):
            continue
        (folder / name).write_bytes(flipped)
        with pytest.raises(CheckpointError):
            read_manifest(folder)


def _same_json(a, b):
    try:
        return json.loads(a) == json.loads(b)
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "a").unlink(), "a is missing"),
        (lambda p: (p / "b").write_bytes(b"x"), "b is damaged: expected 0 bytes, got 1"),
        (lambda p: (p / "a").write_bytes(bytes(200)), "a is damaged or was replaced"),
        (lambda p: (p / MANIFEST).unlink(), "has no manifest.json"),
        (lambda p: (p / MANIFEST).write_text("{"), "not valid JSON"),
        (lambda p: (p / MANIFEST).write_text("{}"), "own hash"),
        (lambda p: (p / MANIFEST).write_text('{"format_version": 9}'), "newer version"),
        (lambda p: ((p / "a").unlink(), make_pipe(p / "a")), "a is missing"),
    ],
)
def test_what_is_refused(folder, change, message):
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(folder)

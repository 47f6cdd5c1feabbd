"""GGUF files that are split, quantized, or damaged."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from support.gguf_files import keys_of, random_weights, tensors_of, write_gguf, write_model

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.gguf_file import TYPES
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting import merge
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.quant import GGML_FORMATS

CONFIG = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return random_weights(CONFIG)


def test_sizes_of_types() -> None:
    known = {kind.value for kind in Type}  # an older gguf has fewer
    assert len(known & TYPES.keys()) >= 28
    for number in known & TYPES.keys():
        kind = TYPES[number]
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.block, kind.nbytes)


def test_each_tensor_has_its_own_type(tmp_path, tensors) -> None:
    """A mixture as llama.cpp makes it: rows of q and k come back to their places bit by bit."""
    types = {"attn_q.weight": Type.Q4_0, "attn_k.weight": Type.Q8_0, "ffn_up.weight": Type.BF16,
             "ffn_down.weight": Type.TQ2_0, "token_embd.weight": Type.Q5_1}  # fmt: skip
    path = write_model(tmp_path / "m.gguf", CONFIG, tensors, types=types, default=Type.F16)
    folder = Pretrained.open(path).folder
    stored = tensors_of(CONFIG, tensors)
    for name, kind, heads in (
        ("self_attn.q_proj", Type.Q4_0, 4), ("self_attn.k_proj", Type.Q8_0, 2),
    ):  # fmt: skip
        leaf = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}[name]
        bits = gguf.quants.quantize(stored[f"blk.1.{leaf}.weight"], kind)
        rows = gguf.quants.dequantize(bits, kind)
        rows = rows.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        full = f"model.layers.1.{name}.weight"
        weight = folder[full].quantized()
        assert np.array_equal(weight.dequantize(), rows)
        assert np.array_equal(folder[full].read(), rows)
        assert weight.format.key == folder[full].format.key
        assert folder[full].shape == rows.shape
    for name, dtype, form, anew in (
        ("model.layers.0.mlp.up_proj.weight", "BF16", None, False),
        ("model.layers.0.mlp.gate_proj.weight", "F16", None, False),
        ("model.layers.0.mlp.down_proj.weight", "TQ2_0", None, True),
        ("model.embed_tokens.weight", "Q5_1", "Q5_1", False),
        ("model.norm.weight", "F32", None, False),
    ):
        found = folder[name].format
        assert folder[name].stored_dtype == dtype
        assert (found and found.name) == form and folder[name].must_requantize is anew
    assert folder.is_quantized and not folder.config["tie_word_embeddings"]
    assert folder["model.layers.0.mlp.down_proj.weight"].dtype == "BF16"


def test_a_stack_of_experts(tmp_path) -> None:
    config = CONFIG | {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 64, "num_hidden_layers": 1}  # fmt: skip
    tensors = random_weights(config)
    path = write_model(tmp_path / "m.gguf", config, tensors, default=Type.Q8_0)
    folder = Pretrained.open(path).folder
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    for i in range(3):
        bits = gguf.quants.quantize(tensors[name.format(i)], Type.Q8_0)
        expected = gguf.quants.dequantize(bits, Type.Q8_0)
        assert np.array_equal(folder[name.format(i)].quantized().dequantize(), expected)
    assert folder[name.format(2)].quantized().format.key == GGML_FORMATS["Q8_0"].form.key


def test_experts_of_gpt_oss(tmp_path) -> None:
    """In MXFP4, with a bias for each, as llama.cpp has the published models."""
    config = CONFIG | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2,
                       "sliding_window": 8, "num_hidden_layers": 1}  # fmt: skip
    tensors = random_weights(config)
    path = write_model(tmp_path / "m.gguf", config, tensors, types={"_exps.weight": Type.MXFP4})
    folder = Pretrained.open(path).folder
    at = "model.layers.0.mlp.experts.{}.{}_proj.{}"
    for i, leaf in itertools.product(range(3), ("gate", "up", "down")):
        bits = gguf.quants.quantize(tensors[at.format(i, leaf, "weight")], Type.MXFP4)
        expected = gguf.quants.dequantize(bits, Type.MXFP4)
        stored = folder[at.format(i, leaf, "weight")].quantized()
        assert np.array_equal(stored.dequantize(), expected)
        assert stored.format.key == GGML_FORMATS["MXFP4"].form.key
        bias = at.format(i, leaf, "bias")
        assert np.array_equal(folder[bias].read(), tensors[bias])
    with pytest.raises(UnsupportedModelError, match="safetensors version"):
        merge(path, tmp_path / "adapter", tmp_path / "merged")


def test_gate_and_up_in_one_stack(tmp_path) -> None:
    config = CONFIG | {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 64, "num_hidden_layers": 1}  # fmt: skip
    hf = random_weights(config)
    stored = tensors_of(config, hf)
    gate, up = (stored.pop(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up"))
    stored["blk.0.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1)
    folder = ModelFolder.open(write_gguf(tmp_path / "m.gguf", "qwen3moe", keys_of(config), stored))
    assert set(folder.names()) == set(hf)
    assert all(np.array_equal(folder[name].read(), array) for name, array in hf.items())


def split(tmp_path, tensors, count=2, **changed):
    stored = list(tensors_of(CONFIG, tensors).items())
    paths = []
    for number in range(count):
        keys = {"split.no": number, "split.count": count} | changed
        keys |= keys_of(CONFIG) if number == 0 else {}
        path = tmp_path / f"m-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write_gguf(path, "llama", keys, dict(stored[number::count])))
    return paths


def test_a_split_model(tmp_path, tensors) -> None:
    paths = split(tmp_path, tensors)
    for path in paths:
        folder = Pretrained.open(path).folder
        assert folder.path == paths[0]
        name = "model.layers.1.mlp.down_proj.weight"
        assert np.array_equal(folder[name].read(), tensors[name])
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing .* .1 of 2"):
        ModelFolder.open(paths[0])
    paths[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="is part 0 of 2 by its metadata"):
        ModelFolder.open(tmp_path / "alone.gguf")


def test_parts_that_are_others(tmp_path, tensors) -> None:
    with pytest.raises(CheckpointError, match="part 1 of 2 by its name"):
        ModelFolder.open(split(tmp_path, tensors, **{"split.no": 0})[0])


def test_a_folder_of_gguf_files_names_one(tmp_path) -> None:
    write_model(tmp_path / "m.gguf", CONFIG, random_weights(CONFIG))
    with pytest.raises(CheckpointError, match=r"use the path of the file, .*m\.gguf"):
        ModelFolder.open(tmp_path)
    with pytest.raises(CheckpointError, match="use the path of that file"):
        (tmp_path / "config.json").write_text("{}")
        ModelFolder.open(tmp_path)


def entry(name=b"t", sizes=(32,), kind=0, offset=0) -> bytes:
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(sizes))
        + struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def key(value: bytes, kind: int) -> bytes:
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


def header(*, keys=(), tensors=()) -> bytes:
    return HEAD + struct.pack("<QQ", len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)


BAD = {
    "empty": (b"", "is empty"),
    "another format": (b"PK\3\4" + bytes(30), "does not begin with GGUF"),
    "short": (HEAD, "has only 8 bytes"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
    "first version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "tensors": (HEAD + struct.pack("<QQ", 2**63, 0), "9223372036854775808 tensors"),
    "keys": (HEAD + struct.pack("<QQ", 0, 2**40), "1099511627776 keys"),
    "no keys": (header(), "general.architecture is missing"),
    "long string": (header(keys=[key(struct.pack("<Q", 2**63), 8)]), "would end at byte"),
    "long array": (header(keys=[key(struct.pack("<IQ", 4, 2**62), 9)]), "would end at byte"),
    "many strings": (header(keys=[key(struct.pack("<IQ", 8, 2**61), 9)]), "would end at byte"),
    "array of arrays": (header(keys=[key(struct.pack("<IQ", 9, 2), 9)]), "of unknown type 9"),
    "kind": (header(keys=[key(b"", 13)]), "of unknown type 13"),
    "text": (header(keys=[key(struct.pack("<Q", 1) + b"\xff", 8)]), "not valid UTF-8"),
    "twice a key": (header(keys=[key(b"\1", 7)] * 2), "has the key 'k' twice"),
    "type": (header(tensors=[entry(kind=4)]), "'t' of unknown type 4"),
    "no dimension": (header(tensors=[entry(sizes=())]), "0 dimensions"),
    "dimensions": (header(tensors=[entry(sizes=(1,) * 5)]), "5 dimensions"),
    "size": (header(tensors=[entry(sizes=(2**40, 2**40))]), "invalid shape"),
    "nothing": (header(tensors=[entry(sizes=(4, 0))]), "invalid shape"),
    "block": (header(tensors=[entry(sizes=(33, 2), kind=2)]), "blocks of 32"),
    "truncated": (header(tensors=[entry(sizes=(32, 4))]) + bytes(64), "tensor 't' would end at"),
    "unaligned": (header(tensors=[entry(offset=4)]) + bytes(256), "not a multiple of 32"),
    "twice a tensor": (header(tensors=[entry(), entry(offset=128)]) + bytes(512), "'t' twice"),
    "overlap": (header(tensors=[entry(), entry(b"u", offset=96)]) + bytes(512), "overlap"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files(tmp_path, what) -> None:
    content, message = BAD[what]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError) as caught:
        ModelFolder.open(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert message in str(caught.value) and str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_alignment(tmp_path, tensors) -> None:
    path = write_model(tmp_path / "m.gguf", CONFIG, tensors, keys={"general.alignment": 48})
    with pytest.raises(CheckpointError, match="48, which is not a power of two"):
        ModelFolder.open(path)


def test_weights_that_are_not_finite(tmp_path, tensors) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for kind in (None, Type.F16):
        bad = tensors | {name: np.full_like(tensors[name], np.nan)}
        folder = ModelFolder.open(write_model(tmp_path / "m.gguf", CONFIG, bad, default=kind))
        with pytest.raises(CheckpointError, match=f"{name}' contains NaN"):
            folder[name].read()

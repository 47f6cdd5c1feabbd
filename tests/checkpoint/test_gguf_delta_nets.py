"""Delta nets in GGUF files: heads in another order, whatever the weights are stored as."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from support.gguf_files import write_gguf
from support.gguf_models import VOCABULARY, changed, folder_of

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.exporting.merge import MergedWeights

Type = gguf.GGMLQuantizationType
WIDE = {
    "hidden_size": 96, "intermediate_size": 96, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
AT = "model.layers.0.linear_attn."


def stored(place, case, types, default=None, width=32, keys=()):
    """A case's file with matrices of these types, and what each of its weights is."""
    sizes = {"linear_key_head_dim": width, "linear_value_head_dim": width}
    config = changed(case) | WIDE | sizes
    merged = MergedWeights(folder_of(place, config), place / "adapter")
    made = gguf_model(merged, find_file_type("f32"), lambda size: VOCABULARY)
    arrays = {}
    for tensor in made.tensors:
        raw = np.concatenate([np.concatenate(list(part()), axis=0) for part in tensor.parts])
        arrays[tensor.name] = raw.view(np.float32).reshape(tensor.shape)
    known = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in made.keys.items()}
    known |= dict(keys)
    path = place / "stored.gguf"
    write_gguf(path, made.architecture, known, arrays, types=types, default=default)
    return ModelFolder.open(path), merged


def near(file, merged, name):
    """Whether a weight is the merged one, within the rounding of 8 bits."""
    array = merged.float32(name)
    return np.abs(file[name].read() - array).max() <= np.abs(array).max() * 0.6 / 127


@pytest.mark.parametrize("case", ["qwen3_5_text", "qwen3_next"])
def test_blocks_of_whole_heads_keep_their_bits(tmp_path, case) -> None:
    """In whatever order rows and columns are, what is read is what the blocks stand for."""
    types = {"conv1d.weight": Type.F32, "ffn_gate_inp.weight": Type.F32}
    file, merged = stored(tmp_path, case, types, Type.Q8_0)
    packed = [n for n in file.names() if AT in n and file[n].stored_dtype == "Q8_0"]
    assert len(packed) == (5 if case == "qwen3_5_text" else 3)
    for name in packed:
        assert near(file, merged, name), name
        weight = file[name].quantized()
        assert weight is not None and not file[name].must_requantize
        assert np.array_equal(weight.dequantize(), file[name].read()), name


def test_blocks_across_heads_are_quantized_anew(tmp_path) -> None:
    """Columns of a block that are of two heads lie apart in Hugging Face's order."""
    name = f"{AT}out_proj.weight"
    file, merged = stored(tmp_path, "qwen3_5_text", {"ssm_out.weight": Type.Q8_0}, width=16)
    assert near(file, merged, name)
    assert file[name].must_requantize and file[name].quantized() is None
    assert file[name].stored_dtype == "Q8_0" and file[name].dtype == "BF16"


def test_two_types_in_one_matrix(tmp_path) -> None:
    """As in a mixture of K-quants, where queries, keys and values have more bits than gates."""
    name = f"{AT}in_proj_qkvz.weight"
    types = {"attn_qkv.weight": Type.Q8_0, "attn_gate.weight": Type.F16}
    file, merged = stored(tmp_path, "qwen3_next", types)
    assert near(file, merged, name) and file[name].must_requantize
    kept = [np.prod(file.placements[name].leaves[i].shape) for i in (0, 1)]
    assert len(file.stored_bytes(name)) == kept[0] // 32 * 34 + kept[1] * 2


def test_which_layers_are_delta_nets(tmp_path) -> None:
    key = "qwen35.attention.recurrent_layers"
    old, _ = stored(
        tmp_path, "qwen3_5_text", {}, keys={key: None, "qwen35.full_attention_interval": 2}
    )
    assert old.config["layer_types"] == WIDE["layer_types"]
    with pytest.raises(CheckpointError, match="must have a value for each of the 2 layers"):
        stored(tmp_path, "qwen3_5_text", {}, keys={key: [True]})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"qwen35.ssm.inner_size": 100}, "inner_size is 100, but .* give 6 heads of 32"),
        ({"qwen35.ssm.group_count": 4}, "6 is not a multiple of ssm.group_count 4"),
        ({"qwen35.ssm.group_count": 2}, "but the heads of the delta nets need 320 rows"),
    ],
)  # fmt: skip
def test_heads_that_are_others(tmp_path, keys, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        stored(tmp_path, "qwen3_5_text", {}, keys=keys)


def test_decays_that_are_none(tmp_path) -> None:
    """What has no logarithm is no finite weight; nothing else is said of it."""
    stored(tmp_path, "qwen3_5_text", {})
    path = tmp_path / "stored.gguf"
    place = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ssm_a")
    content = bytearray(path.read_bytes())
    content[place.data_offset : place.data_offset + 4] = np.float32(0.5).tobytes()
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"linear_attn\.A_log"):
        ModelFolder.open(path)[f"{AT}A_log"].read()


def test_gates_that_are_missing(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="rows, but its key heads need"):
        stored(tmp_path, "qwen3_next", {}, keys={"qwen3next.ssm.group_count": 2})

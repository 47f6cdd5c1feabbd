"""Keys of hybrids with Mamba that do not go together."""

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.families.nemotron_h import ATTENTION, MAMBA, MLP
from qlora_wgpu.gguf import mamba
from qlora_wgpu.gguf.architecture import Keys


def keys_of(architecture="own", **values):
    sizes = {"ssm.inner_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2,
             "ssm.state_size": 8, "ssm.conv_kernel": 3}  # fmt: skip
    sizes |= {key.replace("__", "."): value for key, value in values.items()}
    named = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return Keys({"general.architecture": architecture, **named}, "F")


class File(dict):
    def names(self):
        return list(self)


HEADS = {"mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 8,
         "mamba_d_conv": 3}  # fmt: skip


def test_sizes_of_mamba():
    made = mamba._sizes(keys_of(), {"hidden_size": 8})
    assert made == {"mamba_expand": 2, **HEADS}
    for changes, hidden in (({}, 9), ({"ssm__time_step_rank": 0}, 8),
                            ({"ssm__time_step_rank": 3}, 8)):  # fmt: skip
        with pytest.raises(CheckpointError, match="must be 2 times embedding_length and a"):
            mamba._sizes(keys_of(**changes), {"hidden_size": hidden})
    assert mamba._sizes(keys_of(ssm__time_step_rank=1), {"hidden_size": 8})["mamba_d_head"] == 16


def test_falcon_h1():
    file = File({"blk.0.ssm_conv1d.bias": 0})
    assert mamba.read_parallel(keys_of(), file, {}) == {
        "mamba_d_ssm": 16, **HEADS, "mamba_conv_bias": True, "mamba_rms_norm": False,
        "mamba_norm_before_gate": False,
    }  # fmt: skip
    normed = mamba.read_parallel(keys_of(), File({"blk.0.ssm_norm.weight": 0}), {})
    assert normed["mamba_rms_norm"] and not normed["mamba_conv_bias"]
    for rank in (0, 3, 5):
        with pytest.raises(CheckpointError, match=r"ssm\.inner_size 16 must be a multiple of"):
            mamba.read_parallel(keys_of(ssm__time_step_rank=rank), file, {})


def each(*values):
    return np.array(values, np.uint32)


NEMOTRON = {"num_hidden_layers": 4, "head_dim": 4}


@pytest.mark.parametrize(
    ("heads", "widths", "expected"),
    [
        ((0, 2, 0, 2), (0, 0, 12, 0), ([MAMBA, ATTENTION, MLP, ATTENTION], 2, 12)),
        ((0, 2, 0, 0), (0, 0, 0, 0), ([MAMBA, ATTENTION, MAMBA, MAMBA], 2, 1)),
        ((0, 2, 0, 3), (0, 0, 12, 0), None),
        ((0, 0, 0, 0), (0, 0, 12, 0), None),
        ((0, 2, 0, 0), (0, 0, 12, 8), None),
        ((0, 2, 0, 0), (0, 12, 0, 0), None),
    ],
)
def test_layers_of_nemotron_h_are_one_of_three(heads, widths, expected):
    keys = keys_of(
        "nemotron_h", attention__head_count_kv=each(*heads), feed_forward_length=each(*widths),
    )  # fmt: skip
    if expected is None:
        with pytest.raises(CheckpointError, match="layers must have either key heads, as many in"):
            mamba.read_nemotron_h(keys, File(), NEMOTRON)
        return
    made = mamba.read_nemotron_h(keys, File({"blk.0.ssm_conv1d.bias": 0}), NEMOTRON)
    kinds, key_heads, size = expected
    assert made["layers_block_type"] == kinds
    assert (made["num_key_value_heads"], made["intermediate_size"]) == (key_heads, size)
    assert (made["mamba_num_heads"], made["mamba_head_dim"]) == (4, 4)
    assert (made["n_groups"], made["ssm_state_size"], made["conv_kernel"]) == (2, 8, 3)
    assert (made["use_conv_bias"], made["mlp_bias"], made["time_step_min"]) == (True, False, 0.001)


def nemotron(**changes):
    given = {"attention__head_count_kv": each(0, 2, 0, 0), "feed_forward_length": each(0, 0, 9, 9)}
    return keys_of("nemotron_h", **given | changes)


def test_heads_and_further_layers_of_nemotron_h():
    for rank in (0, 3):
        with pytest.raises(CheckpointError, match=r"ssm\.inner_size 16 must be a multiple of"):
            mamba.read_nemotron_h(nemotron(ssm__time_step_rank=rank), File(), NEMOTRON)
    one = mamba.read_nemotron_h(nemotron(ssm__time_step_rank=1), File(), NEMOTRON)
    assert one["mamba_head_dim"] == 16
    with pytest.raises(UnsupportedModelError, match=r"attention\.value_length = 8"):
        mamba.read_nemotron_h(nemotron(attention__value_length=8), File(), NEMOTRON)
    guessing = nemotron(nextn_predict_layers=1, feed_forward_length=each(0, 0, 9, 8))
    assert len(mamba.read_nemotron_h(guessing, File(), NEMOTRON)["layers_block_type"]) == 3


def test_bamba_has_no_factors():
    factors = {"attention_multiplier": 0.5, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
               "logits_scaling": 1.0, "head_dim": 4}  # fmt: skip
    config = dict(factors)
    mamba._refuse_factors(keys_of(), config)
    assert config == {"head_dim": 4}
    for name in list(factors)[:4]:
        with pytest.raises(UnsupportedModelError, match=f"{name} = 3 is not supported for Bamba"):
            mamba._refuse_factors(keys_of(), factors | {name: 3.0})

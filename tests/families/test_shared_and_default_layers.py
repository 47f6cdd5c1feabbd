"""Layers that others share, and those of a family's default."""

from types import SimpleNamespace

import pytest
from families.small_configs import NEEDED, read

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.families import zamba2
from qlora_wgpu.families.family import Architecture


def test_layers_whose_weights_several_use():
    names = ["a", "b", "a", "c", "c", "c"]
    own = SimpleNamespace(linears=[SimpleNamespace(stored=name) for name in names])
    assert Architecture.shared_linears.fget(own) == {"a", "c"}
    assert not read("llama").shared_linears


def test_the_default_layers_of_zamba_2(monkeypatch):
    monkeypatch.setattr(zamba2.parts, "read_block_types", lambda *given: None)
    kinds = zamba2._kinds(None)
    assert len(kinds) == 54 and kinds.count("hybrid") == 9
    assert [i for i, kind in enumerate(kinds) if kind == "hybrid"] == [
        6, 12, 18, 24, 30, 36, 42, 47, 51,
    ]  # fmt: skip
    monkeypatch.setattr(zamba2.parts, "read_block_types", lambda *given: ["hybrid"])
    assert zamba2._kinds(None) == ["hybrid"]


@pytest.mark.parametrize("types", [
    ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    ["sliding_attention"] * 4,
])  # fmt: skip
def test_a_window_that_is_not_used(types):
    with pytest.raises(UnsupportedModelError, match="use_sliding_window is not true"):
        read("qwen2_moe", layer_types=types)
    read("qwen2_moe", layer_types=["full_attention"] * 4)


@pytest.mark.parametrize(("per_token", "fits"), [(4, True), (5, False)])
def test_a_token_has_no_more_experts_than_there_are(per_token, fits):
    config = {**NEEDED.get("deepseek_v2", {}), "n_routed_experts": 4, "n_group": None,
              "topk_group": None, "num_experts_per_tok": per_token}  # fmt: skip
    if fits:
        read("deepseek_v2", **config)
        return
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok"):
        read("deepseek_v2", **config)

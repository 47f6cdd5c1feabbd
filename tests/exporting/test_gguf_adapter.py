"""GGUF adapters of mixtures: llama.cpp has the experts of a layer in one tensor."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from references.sized import family_configs, traced_configs
from safetensors.numpy import load_file
from support.gguf_models import adapter_of, folder_of

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.exporting import export_gguf
from qlora_wgpu.families.family import Stacking, find_family
from qlora_wgpu.gguf.architectures import BY_MODEL_TYPE as ARCHITECTURES
from qlora_wgpu.lora import AdapterConfig, save_adapter

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
MODELS = {
    "qwen3_moe": (
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "mlp.experts.{}.gate_proj", "mlp.experts.{}.down_proj",
    ),
    "mixtral": (
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w2",
    ),
    "gpt_oss": (
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        "mlp.experts.{}.gate_proj", "mlp.experts.{}.down_proj",
    ),
    "granitemoehybrid": (
        {
            "num_local_experts": 0, "layer_types": ["attention"] * 2,
            "shared_intermediate_size": 24,
        },
    ),
}  # fmt: skip


def matrices(name: str, rows: int, columns: int, r: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(name) + rows)
    at = f"base_model.model.model.layers.1.{name}"
    return {
        f"{at}.lora_A.weight": rng.standard_normal((r, columns), np.float32),
        f"{at}.lora_B.weight": rng.standard_normal((rows, r), np.float32),
    }


def exported(tmp_path, model_type, tensors, targets):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, **SIZES, **MODELS[model_type][0]})
    )
    config = AdapterConfig(2, 8, 0.0, targets, True, "a/base")
    stacking = Stacking(in_turns=True) if model_type == "gpt_oss" else None
    save_adapter(tmp_path / "adapter", tensors, config, stacking=stacking)
    count = export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    arch = reader.get_field("general.architecture").contents()
    return count, arch, {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize(
    ("model_type", "arch"),
    [("qwen3_moe", "qwen3moe"), ("mixtral", "llama"), ("gpt_oss", "gpt-oss")],
)
def test_experts_are_stacked(tmp_path, model_type, arch) -> None:
    _, gate, down = MODELS[model_type]
    tensors = matrices("self_attn.v_proj", 8, 16)
    for i in range(3):
        tensors |= matrices(gate.format(i), 24, 16) | matrices(down.format(i), 16, 24)
    leaves = ["v_proj", gate.rpartition(".")[2], down.rpartition(".")[2]]
    count, architecture, written = exported(tmp_path, model_type, tensors, leaves)
    assert (count, architecture) == (7, arch)
    assert {name for name in written if "attn_v" in name} == {
        "blk.1.attn_v.weight.lora_a", "blk.1.attn_v.weight.lora_b",
    }  # fmt: skip
    assert len(written) == 6
    for name, leaf in (("gate", gate), ("down", down)):
        for side, scale in (("a", 1.0), ("b", np.float32(2**0.5))):  # rsLoRA's, in B
            stack = written[f"blk.1.ffn_{name}_exps.weight.lora_{side}"]
            for i in range(3):
                at = f"base_model.model.model.layers.1.{leaf.format(i)}.lora_{side.upper()}.weight"
                assert np.allclose(stack[i], tensors[at] * scale, rtol=1e-6)


def test_mixtral_s_queries_are_permuted_as_llama_s(tmp_path) -> None:
    tensors = matrices("self_attn.q_proj", 16, 16)
    _, _, written = exported(tmp_path, "mixtral", tensors, ["q_proj"])
    b = tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    rows = written["blk.1.attn_q.weight.lora_b"] / np.float32(2**0.5)
    assert np.allclose(rows[:4], b[[0, 2, 1, 3]], rtol=1e-6)


def test_an_expert_that_is_left_out_is_refused(tmp_path) -> None:
    gate = MODELS["qwen3_moe"][1]
    tensors = matrices(gate.format(0), 24, 16) | matrices(gate.format(2), 24, 16)
    with pytest.raises(UnsupportedModelError, match="has 2 of 3; merge"):
        exported(tmp_path, "qwen3_moe", tensors, ["gate_proj"])


def with_ends(tmp_path, *, tied):
    """A Llama's adapter for embedding and head, of rank 2, scaled by 8 / √2."""
    config = {**SIZES, "model_type": "llama", "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng, at = np.random.default_rng(3), "base_model.model."
    tensors = {
        f"{at}model.embed_tokens.lora_embedding_A": rng.standard_normal((2, 32), np.float32),
        f"{at}model.embed_tokens.lora_embedding_B": rng.standard_normal((16, 2), np.float32),
        f"{at}lm_head.lora_A.weight": rng.standard_normal((2, 16), np.float32),
        f"{at}lm_head.lora_B.weight": rng.standard_normal((32, 2), np.float32),
    }
    targets = AdapterConfig(2, 8, 0.0, ["embed_tokens", "lm_head"], True, "a/base")
    save_adapter(tmp_path / "adapter", tensors, targets)
    return tensors.values()


def test_embedding_and_head_of_their_own(tmp_path) -> None:
    """llama.cpp looks rows up in the embedding's A, which has a row for each token."""
    a, b, head_a, head_b = with_ends(tmp_path, tied=False)
    assert export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf") == 2
    written = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert len(written) == 4
    root = np.float32(2**0.5)  # rsLoRA's, which llama.cpp does not know
    rows, outputs = (written[f"token_embd.weight.lora_{side}"] for side in "ab")
    assert rows.shape == (32, 2) and outputs.shape == (16, 2)
    assert np.allclose(rows @ outputs.T, root * (b @ a).T, rtol=1e-5, atol=1e-5)
    assert np.array_equal(written["output.weight.lora_a"], head_a)
    assert np.allclose(written["output.weight.lora_b"], head_b * root, rtol=1e-6)


def test_embedding_and_head_in_one_are_refused(tmp_path) -> None:
    with_ends(tmp_path, tied=True)
    with pytest.raises(UnsupportedModelError, match=r"adapts model\.embed_tokens.* one matrix"):
        export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf")


def test_gate_and_up_of_granite_4_are_two_tensors(tmp_path) -> None:
    tensors = matrices("shared_mlp.input_linear", 48, 16)
    tensors |= matrices("shared_mlp.output_linear", 16, 24)
    leaves = ["input_linear", "output_linear"]
    count, arch, written = exported(tmp_path, "granitemoehybrid", tensors, leaves)
    assert (count, arch, len(written)) == (2, "granite", 6)
    a, b, *_ = tensors.values()
    for name, rows in (("gate", b[:24]), ("up", b[24:])):
        assert np.array_equal(written[f"blk.1.ffn_{name}.weight.lora_a"], a)
        scaled = written[f"blk.1.ffn_{name}.weight.lora_b"]
        assert np.allclose(scaled, rows * np.float32(2**0.5), rtol=1e-6)


CONFIGS = family_configs()
CONFIGS["mistral3"] = {"model_type": "mistral3", "text_config": CONFIGS["ministral3"]}
CONFIGS["qwen3_next"] |= {"mlp_only_layers": []}  # llama.cpp has it with experts alone


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_llama_cpp_has_a_name_for_every_layer(tmp_path, model_type) -> None:
    config = CONFIGS[model_type]
    (tmp_path / "config.json").write_text(json.dumps(config))
    linears = find_family(config).read(config).every_linear
    unadapted = ARCHITECTURES[model_type].unadapted
    linears = [spec for spec in linears if spec.name.rpartition(".")[2] not in unadapted]
    tensors = {}
    for spec in linears:
        at = f"base_model.model.{spec.name}"
        tensors[f"{at}.lora_A.weight"] = np.ones((1, spec.in_features), np.float32)
        tensors[f"{at}.lora_B.weight"] = np.ones((spec.out_features, 1), np.float32)
    targets = sorted({spec.name.rpartition(".")[2] for spec in linears})
    save_adapter(tmp_path / "adapter", tensors, AdapterConfig(1, 1, 0.0, targets, False, "a/base"))
    assert export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf") == len(linears)


def test_what_llama_cpp_leaves_out_is_refused(tmp_path) -> None:
    config = CONFIGS["gemma4_text"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    at = "base_model.model.model.per_layer_model_projection.lora_"
    pair = {f"{at}A.weight": np.ones((1, 72)), f"{at}B.weight": np.ones((50, 1))}
    target = AdapterConfig(1, 1, 0.0, ["per_layer_model_projection"], False, "a/base")
    save_adapter(tmp_path / "adapter", pair, target)
    with pytest.raises(UnsupportedModelError, match=r"for which llama\.cpp ignores adapters"):
        export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf")


GEMMA_4 = traced_configs()["gemma4-experts"]


@pytest.mark.parametrize("leaves", [("gate_proj", "up_proj"), ("up_proj",), ("down_proj",)])
def test_experts_of_gemma_4(tmp_path, leaves) -> None:
    """llama.cpp has gate and up in one, and adds what an adapter makes past an expert's factor."""
    place = folder_of(tmp_path, GEMMA_4, adapter=False)
    adapter_of(place, GEMMA_4, leaves)
    export_gguf(place, place / "adapter", tmp_path / "a.gguf")
    written = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    ours = load_file(place / "adapter/adapter_model.safetensors")
    weights = load_file(place / "model.safetensors")
    factors = weights["model.layers.1.router.per_expert_scale"]
    stack = "down" if "down_proj" in leaves else "gate_up"
    a, b = (written[f"blk.1.ffn_{stack}_exps.weight.lora_{side}"] for side in "ab")
    for expert in range(7):
        shares = []
        for leaf in ("down_proj",) if stack == "down" else ("gate_proj", "up_proj"):
            at = f"base_model.model.model.layers.1.experts.{expert}.{leaf}.lora_"
            rows = 72 if stack == "down" else 44
            share = np.zeros((rows, a.shape[-1]))
            if leaf in leaves:
                share = 6 / 3 * (ours[f"{at}B.weight"] @ ours[f"{at}A.weight"])
            shares.append(share * (factors[expert] if stack == "down" else 1))
        theirs = 6 / b.shape[-1] * (b[expert] @ a[expert])  # llama.cpp's scaling
        assert np.allclose(theirs, np.concatenate(shares), rtol=1e-5, atol=1e-5)


def test_heads_of_delta_nets_have_llama_cpp_s_order(tmp_path) -> None:
    """Two heads of values share a key: B of what makes them, and A of what reads them."""
    config = CONFIGS["qwen3_5_text"]
    outer = {"model_type": "qwen3_5", "text_config": config}  # with images: its text part
    (tmp_path / "config.json").write_text(json.dumps(outer))
    at, pairs = "base_model.model.model.language_model.layers.0.linear_attn", {}
    for leaf, (rows, columns) in {"in_proj_b": (6, 72), "out_proj": (72, 144)}.items():
        pairs[f"{at}.{leaf}.lora_A.weight"] = np.arange(columns, dtype=np.float32)[None]
        pairs[f"{at}.{leaf}.lora_B.weight"] = np.arange(rows, dtype=np.float32)[:, None]
    targets = AdapterConfig(1, 1, 0.0, ["in_proj_b", "out_proj"], False, "a/base")
    save_adapter(tmp_path / "adapter", pairs, targets)
    assert export_gguf(tmp_path, tmp_path / "adapter", tmp_path / "a.gguf") == 2
    stored = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    order = [0, 2, 4, 1, 3, 5]
    assert stored["blk.0.ssm_beta.weight.lora_b"][:, 0].tolist() == order
    columns = [24 * head + i for head in order for i in range(24)]
    assert stored["blk.0.ssm_out.weight.lora_a"][0].tolist() == columns
    assert np.array_equal(stored["blk.0.ssm_out.weight.lora_b"][:, 0], np.arange(72))

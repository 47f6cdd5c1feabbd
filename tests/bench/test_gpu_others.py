"""What a GPU's measurement does beside steps, on a model that is as good as nothing."""

import json
from types import SimpleNamespace

import pytest
from bench.parts import BENCHMARKS

from qlora_wgpu.bench.workload import find_shape

CONFIG = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 96,
          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
          "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip


@pytest.fixture
def others(gpu, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_others

    return SimpleNamespace(**vars(gpu_others))


@pytest.fixture
def shape(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    return find_shape(str(config))


@pytest.mark.full
def test_new_tokens_of_several_texts_are_timed_with_their_bytes(others, shape, device):
    model = others.model_of(shape, device)
    one, two = (others.texts_at_once(model, texts) for texts in (1, 2))
    assert one["tokens_per_second"] > 0 and one["launches"] > 10
    assert two["mib_a_turn"] > one["mib_a_turn"]  # the cache of another text
    turns = two["tokens_per_second"] / 2
    assert two["bytes_per_second"] == pytest.approx(two["mib_a_turn"] * 2**20 * turns)


@pytest.mark.full
def test_a_compared_pair_and_a_budget_are_timed(others, shape, device):
    model = others.model_of(shape, device)
    for compared in (False, True):
        assert others.pair(model, 16, 1, compared=compared)["tokens_per_second"] > 0
    found = others.under_a_budget(shape, device.backend.name, 16)
    assert found["peak_mib"] <= found["budget_mib"] < found["whole_mib"]

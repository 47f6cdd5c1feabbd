"""Sizes that files of all architectures have."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.gguf import config as gguf_config
from qlora_wgpu.gguf.architecture import Keys

OWN = SimpleNamespace(own_sizes=False, epsilon="rms_norm_eps", layer_norm=False, hybrid=False)
SIZES = {
    "attention.head_count": 4, "embedding_length": 8, "feed_forward_length": 12, "block_count": 2,
    "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def read(monkeypatch, metadata=None, architecture=OWN, **changes):
    monkeypatch.setattr(gguf_config, "read_rope", lambda keys, file, head_dim: {"rope": head_dim})
    named = {f"own.{key.replace('__', '.')}": value for key, value in (SIZES | changes).items()}
    keys = Keys({"general.architecture": "own", **named}, "F")
    place = SimpleNamespace(place=SimpleNamespace(shape=(50, 8)))

    class File(dict):
        path = "F"

        def tensor(self, name):
            return place

    file = File()
    file.metadata = metadata or {}
    return gguf_config._common(keys, file, architecture)


def test_what_is_left_out_follows_from_the_rest(monkeypatch):
    assert read(monkeypatch, {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": "x"}
                ) == {
        "vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "bos_token_id": 3, "rope": 2,
    }  # fmt: skip
    given = read(
        monkeypatch, attention__head_count_kv=2, attention__key_length=6,
        attention__value_length=6, attention__causal=True,
    )  # fmt: skip
    assert (given["num_key_value_heads"], given["head_dim"], given["rope"]) == (2, 6, 6)


@pytest.mark.parametrize(("heads", "works"), [(0, False), (1, True), (8, True), (9, False)])
def test_heads_are_no_more_than_the_residual_stream_is_wide(monkeypatch, heads, works):
    if works:
        assert read(monkeypatch, attention__head_count=heads)["head_dim"] == 8 // heads
        return
    with pytest.raises(CheckpointError, match=f"head_count is {heads}, but embedding_length is 8"):
        read(monkeypatch, attention__head_count=heads)


def test_layers_without_key_heads_are_of_hybrids(monkeypatch):
    hybrid = SimpleNamespace(**{**vars(OWN), "hybrid": True})
    for counts, expected in (([0, 2], 2), ([2, 2], 2), ([0, 0], None), ([1, 2], None)):
        given = {"attention__head_count_kv": np.array(counts, np.uint32)}
        if expected:
            assert read(monkeypatch, None, hybrid, **given)["num_key_value_heads"] == expected
            continue
        with pytest.raises(CheckpointError, match="must have exactly one number other than 0"):
            read(monkeypatch, None, hybrid, **given)

"""Trained rows of an adapter, by the names of the matrices in a base's files."""

import importlib

import numpy as np
import pytest
from e2e.tiny import VOCAB, write_model

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import TOKENS, tensor_name


@pytest.mark.parametrize("last", [VOCAB - 1, VOCAB])
def test_a_row_beyond_the_base_is_refused(tmp_path, monkeypatch, last):
    rows = {tensor_name("model.embed_tokens", TOKENS): np.ones((2, 36), np.float32)}
    config = AdapterConfig(4, 8, 0.0, ["q_proj"], False, None, trainable_token_indices=[0, last])
    merge = importlib.import_module("qlora_wgpu.exporting.merge")
    monkeypatch.setattr(merge, "load_adapter", lambda *_, **__: (rows, config))
    monkeypatch.setattr(merge, "refuse_other_base", lambda *_, **__: None)
    monkeypatch.setattr(merge, "rows_for", lambda *_: VOCAB)
    given = write_model(tmp_path / "model"), tmp_path / "adapter"
    if last < VOCAB:
        weight = MergedWeights(*given).float32("model.embed_tokens.weight")
        assert (weight[[0, last]] == 1).all() and not (weight[1] == 1).all()
    else:
        with pytest.raises(ConfigError, match=f"token {VOCAB} does not exist: .* has 83 tokens"):
            MergedWeights(*given)

"""Trained rows of an adapter, by the names of the matrices in a base's files."""

import numpy as np
import pytest
from e2e.tiny import CONFIG, VOCAB, write_model

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.export.merge import trained_rows_by_name
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora.config import AdapterConfig
from qlora_wgpu.lora.peft_names import TOKENS, tensor_name


@pytest.mark.parametrize("last", [VOCAB - 1, VOCAB])
def test_a_row_beyond_the_base_is_refused(tmp_path, last):
    folder = ModelFolder.open(write_model(tmp_path / "model"))
    rows = {tensor_name("model.embed_tokens", TOKENS): np.ones((2, 36), np.float32)}
    config = AdapterConfig(4, 8, 0.0, ["q_proj"], False, None, trainable_token_indices=[0, last])
    given = folder, find_family(CONFIG).read(CONFIG), rows, config
    if last < VOCAB:
        (stored,) = trained_rows_by_name(*given).values()
        assert list(stored.indices) == [0, last]
    else:
        with pytest.raises(CheckpointError, match=f"trained token {VOCAB}, but .* 83 tokens"):
            trained_rows_by_name(*given)

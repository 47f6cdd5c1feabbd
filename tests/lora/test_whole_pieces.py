"""A matrix that is trained whole and is larger than a binding goes through several pieces."""

import numpy as np
import pytest

from qlora_wgpu import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import LinearSpec
from qlora_wgpu.lora.flat_vector import AdapterDtypes
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.peft_names import WHOLE
from qlora_wgpu.lora.trained_tokens import Vocabulary

ROWS, COLUMNS = 1101, 68
MOST = 4 * 72 * 600  # bytes: 512 of its rows, and not 768
LINEARS = [LinearSpec("layers.0.q_proj", 40, COLUMNS), LinearSpec("layers.0.k_proj", 24, COLUMNS)]
VOCABULARY = Vocabulary("embed_tokens", "lm_head", ROWS, COLUMNS, tied=False)
CONFIG = LoraConfig(r=3, modules_to_save=["lm_head"])


def laid_out(most, **options):
    forms = AdapterDtypes(**options)
    return AdapterLayout(CONFIG, LINEARS, (), forms, most, vocabulary=VOCABULARY)


def test_its_parts_are_its_rows():
    adapter = laid_out(MOST)
    whole = adapter.trained_whole["lm_head"]
    assert [(row0, rows.rows) for row0, rows in whole.rows] == [(0, 512), (512, 589)]
    assert all(piece.nbytes <= MOST for piece in adapter.parameters.shards)
    flat = np.arange(adapter.length, dtype=np.float32)
    expected = adapter.place("lm_head", WHOLE).view(flat)
    pieces = {id(p.storage): flat[b : b + p.columns] for b, p in adapter.parameters.numbered()}
    for row0, rows in whole.rows:
        assert rows.offset % 256 == 0
        values = pieces[id(rows.storage)][rows.offset // 4 :][: rows.rows * rows.stride]
        own = values.reshape(rows.rows, -1)[:, :COLUMNS]
        assert np.array_equal(own, expected[row0 : row0 + rows.rows])
    assert len(whole.gradients) == 2


def test_it_is_one_tensor_in_files_and_checkpoints():
    adapter, other = laid_out(MOST), laid_out(None)
    assert len(other.trained_whole["lm_head"].rows) == 1
    assert adapter.shapes == other.shapes
    assert adapter.shapes["base_model.model.lm_head.weight"] == (ROWS, COLUMNS)
    zeros = np.zeros(adapter.length, np.float32)
    assert (
        adapter.moments.split([zeros, zeros]).keys() == other.moments.split([zeros, zeros]).keys()
    )


def test_moments_in_8_bits_are_refused_with_a_sentence():
    with pytest.raises(ConfigError, match=r"set optim.name to adamw"):
        laid_out(MOST, optimizer="adamw_8bit")
    assert laid_out(None, optimizer="adamw_8bit").moments.blocks is not None

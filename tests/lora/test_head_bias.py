"""A bias of the head, as Phi 2 has it: what PEFT trains otherwise is refused."""

import pytest
from references.sized import family_configs

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError, UnsupportedModelError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.lora.layout import AdapterLayout
from qlora_wgpu.lora.trained_tokens import Vocabulary

CONFIG = family_configs()["phi"]


def adapter(config=CONFIG, **settings):
    of = find_family(config).read(config)
    return AdapterLayout(
        LoraConfig(r=2, **settings), of.linears, of.experts, vocabulary=Vocabulary.of(of)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: lm_head has a bias"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "indices: lm_head has a bias"),
    ],
)
def test_a_head_that_is_trained(settings, message):
    with pytest.raises(ConfigError, match=message):
        adapter(**settings)
    tied = CONFIG | {"tie_word_embeddings": True}
    with pytest.raises(ConfigError, match="lm_head has a bias"):
        adapter(tied, trainable_token_indices=[1])


def test_the_embedding_alone_and_a_pair_of_the_head():
    assert adapter(trainable_token_indices=[1]).trained_rows
    assert adapter(modules_to_save=["embed_tokens"]).trained_whole
    assert "lm_head" in adapter(target_modules=["fc1", "lm_head"]).loras


def test_no_tokens_are_added_beyond_the_bias():
    architecture = find_family(CONFIG).read(CONFIG)
    rows = architecture.vocab_size
    added = Vocabulary.of(architecture.resized(rows, (3,)))
    with pytest.raises(ConfigError, match="tokens cannot be added"):
        added.trained(None)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.bias has a number for each token"):
        architecture.resized(rows + 1)

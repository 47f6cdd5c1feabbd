"""LoRA on the embedding: PEFT's ``lora_embedding_A`` (r, vocab_size) and ``lora_embedding_B``."""

from __future__ import annotations

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.lora.tokens import Vocabulary


def check_ends(
    config: LoraConfig, vocabulary: Vocabulary, adapted: set[str], *, trains_rows: bool
) -> None:
    """Makes sure that an embedding or a head which is adapted can be.

    Args:
        config: The adapter's settings.
        vocabulary: The two.
        adapted: The modules that have a pair.
        trains_rows: Whether rows of the embedding, or of the head, are trained.

    Raises:
        ConfigError: If it cannot.
    """
    ends = [name for name in (vocabulary.embedding, vocabulary.head) if name in adapted]
    if not ends:
        return
    name = ends[0]
    if config.use_dora:
        raise ConfigError(
            f"lora.use_dora cannot adapt {name}, whose rows' norms are not computed here: "
            "leave it out of lora.target_modules, or set lora.use_dora to false"
        )
    if config.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {config.init_lora_weights} cannot begin an adapter of "
            f"{name}: leave that out of lora.target_modules, or begin with default"
        )
    if trains_rows:
        raise ConfigError(
            f"lora.target_modules names {name}, and rows of tokens are trained "
            "(lora.trainable_token_indices, model.add_tokens), which PEFT cannot load together: "
            "leave one of them out"
        )
    if config.ensure_weight_tying and vocabulary.tied:
        raise ConfigError(
            f"lora.ensure_weight_tying and {name} in lora.target_modules: {vocabulary.head} is "
            f"tied to {vocabulary.embedding}, and one pair for both is not computed here; leave "
            "ensure_weight_tying false, with which PEFT adapts what is named alone"
        )

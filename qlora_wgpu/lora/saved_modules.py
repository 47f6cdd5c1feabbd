"""Which matrices of the vocabulary are trained whole: PEFT's ``modules_to_save``."""

from __future__ import annotations

from collections.abc import Collection

from qlora_wgpu.config import LoraConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.lora.forms import AdapterForms
from qlora_wgpu.lora.tokens import Vocabulary

_SETTING = "lora.modules_to_save"


def saved_modules(config: LoraConfig, vocabulary: Vocabulary) -> tuple[str, ...]:
    """The modules, the embedding's first; of a tied head the embedding's alone, which is both.

    Raises:
        ConfigError: If another module is named, or a tied one where weights are not to stay tied,
            or a head with a bias.
    """
    names = config.modules_to_save or []
    both = (vocabulary.embedding, vocabulary.head)
    chosen = {_module(name, both) for name in names}
    if vocabulary.bias and vocabulary.head in chosen:
        raise ConfigError(
            f"{_SETTING}: {vocabulary.head} has a bias, which PEFT would train, too, and nothing "
            "here does: leave it out, or name it in lora.target_modules"
        )
    if chosen and vocabulary.tied:
        if not config.ensure_weight_tying:
            raise ConfigError(
                f"{_SETTING} names {names[0]}, and {vocabulary.head} is tied to "
                f"{vocabulary.embedding}: set lora.ensure_weight_tying to true, which trains both "
                "as one; without it PEFT trains two, which is not computed here: merge an adapter "
                "that has two with PEFT"
            )
        return (vocabulary.embedding,)
    return tuple(module for module in both if module in chosen)


def _module(name: str, both: tuple[str, str]) -> str:
    found = [module for module in both if f".{module}".endswith(f".{name}")]
    if not found:
        leaf = both[0].rpartition(".")[2]
        raise ConfigError(
            f"{_SETTING}: only {leaf} and {both[1]} are trained whole, not {name!r}: norms, "
            "classifiers and all else stay frozen, so leave it out, or merge an adapter that has "
            "it with PEFT"
        )
    return found[0]


def check_saved(
    saved: Collection[str],
    config: LoraConfig,
    adapted: Collection[str],
    forms: AdapterForms,
    *,
    trains_rows: bool,
) -> None:
    """Makes sure that matrices which are trained whole can be, beside all else.

    Args:
        saved: Their modules.
        config: The adapter's settings.
        adapted: The layers that have a pair.
        forms: In which types gradient and moments are kept.
        trains_rows: Whether rows of the embedding, or of the head, are trained.

    Raises:
        ConfigError: If they cannot.
    """
    if not saved:
        return
    if twice := sorted(set(saved) & set(adapted)):
        raise ConfigError(
            f"{_SETTING} and lora.target_modules both name {twice[0]}: leave it out of one of them"
        )
    if trains_rows:
        raise ConfigError(
            f"{_SETTING} trains whole matrices, and lora.trainable_token_indices or "
            "model.add_tokens rows of them: leave one of them out"
        )
    if config.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {config.init_lora_weights} and {_SETTING} exclude each "
            "other: begin with default"
        )
    if forms.gradient != "float32":
        raise ConfigError(
            f"{_SETTING} sums gradients up in float32 alone: set train.gradient_dtype to float32"
        )

"""What a page cannot train yet, refused before anything is written."""

from __future__ import annotations

import json

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.steps import StepOptions

SCHEDULES = ("constant", "constant_with_warmup", "linear", "cosine")


def check_settings(settings: Config) -> None:
    """Refuses settings that need more than a page does.

    Raises:
        ConfigError: If there is one.
    """
    model, lora, optim = settings.model, settings.lora, settings.optim
    found = [
        ("train.objective", settings.train.objective, "sft"),
        ("model.add_tokens", model.add_tokens or None, None),
        ("model.add_special_tokens", model.add_special_tokens or None, None),
        ("lora.init_from", lora.init_from, None),
        ("lora.trainable_token_indices", lora.trainable_token_indices, None),
        ("lora.modules_to_save", lora.modules_to_save, None),
    ]
    for name, value, wanted in found:
        if value != wanted:
            raise ConfigError(
                f"{name} = {_in_yaml(value)} is not trained in a browser: set it to "
                f"{_in_yaml(wanted)}"
            )
    if optim.name == "lion":
        raise ConfigError(
            "optim.name = lion is not trained in a browser: set it to adamw or adamw_8bit"
        )
    if lora.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights = {lora.init_lora_weights} changes the base, which is not "
            f"done for a browser: set it to default or gaussian"
        )
    if settings.data.has_weights:
        raise ConfigError(
            "weights of rows are not trained in a browser: leave data.columns.weight out"
        )
    if settings.data.apply_chat_template:
        raise ConfigError(
            "data.apply_chat_template = true is not known to the page: set it to false, and write "
            "the rows as messages"
        )
    if settings.data.truncation == "windows":
        raise ConfigError(
            "data.truncation = windows is not known to the page: set it to keep_start, or write "
            "longer texts in several rows"
        )
    if optim.lr_scheduler_type not in SCHEDULES:
        raise ConfigError(
            f"optim.lr_scheduler_type = {optim.lr_scheduler_type} is not known to the page: set "
            f"it to one of {', '.join(SCHEDULES)}"
        )
    if optim.lr_scheduler_kwargs:
        raise ConfigError(
            f"optim.lr_scheduler_kwargs = {json.dumps(optim.lr_scheduler_kwargs)} is not known to "
            f"the page: leave it out"
        )


def _in_yaml(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def check_model(layout: ModelLayout) -> None:
    """Refuses a model whose micro-batches have inputs, or its adapter a start, beyond a page.

    Raises:
        ConfigError: If it is one.
    """
    if layout.adapter.embedding is not None:
        raise ConfigError(
            f"lora.target_modules: LoRA on {layout.adapter.embedding.name} is not trained in a "
            "browser: leave it out"
        )
    batch = layout.step(StepOptions("loss", 1, 32)).batch
    if batch.angles:
        raise ConfigError(
            "rotations by a text's length (LongRoPE, dynamic RoPE) are not computed in a browser: "
            "choose another model"
        )
    if batch.embedded:
        raise ConfigError(
            "embeddings that wait in host memory (Gemma 4's of each layer) are not looked up in a "
            "browser: choose another model"
        )

"""What a page does not train is refused by name, and all else is not."""

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.web.site import SCHEDULES, check_settings


def settings(**sections):
    return Config.model_validate({"model": {"path": "base"}, **sections})


def test_what_a_page_trains_is_taken():
    check_settings(settings())
    for schedule in SCHEDULES:
        check_settings(settings(optim={"lr_scheduler_type": schedule, "name": "adamw_8bit"}))


@pytest.mark.parametrize(("sections", "told"), [
    ({"train": {"objective": "dpo"}}, "train.objective = dpo .* set it to sft"),
    ({"model": {"path": "base", "add_tokens": ["a"]}}, "model.add_tokens = .* set it to null"),
    ({"model": {"path": "base", "add_special_tokens": ["a"]}}, "model.add_special_tokens"),
    ({"lora": {"init_from": "folder"}}, "lora.init_from"),
    ({"lora": {"trainable_token_indices": [1]}}, "lora.trainable_token_indices"),
    ({"lora": {"modules_to_save": ["lm_head"]}}, "lora.modules_to_save"),
    ({"optim": {"name": "lion"}}, "optim.name = lion"),
    ({"lora": {"init_lora_weights": "pissa"}}, "init_lora_weights = pissa is not supported"),
    ({"data": {"train": "a.jsonl", "columns": {"weight": "w"}}}, "row weights"),
    ({"data": {"apply_chat_template": True}}, "apply_chat_template = true"),
    ({"data": {"truncation": "windows"}}, "truncation = windows"),
    ({"optim": {"lr_scheduler_type": "polynomial"}}, "lr_scheduler_type"),
    ({"optim": {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}},
     "lr_scheduler_kwargs = .* is not supported in a browser: remove it"),
])  # fmt: skip
def test_what_it_does_not_train_is_refused_by_name(sections, told):
    with pytest.raises(ConfigError, match=told):
        check_settings(settings(**sections))

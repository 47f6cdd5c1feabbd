"""Settings of an adapter_config.json: read, refused in a sentence, or without a say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora.test_adapter_files import change_config, folder, refused

from qlora_wgpu.errors import UnsupportedModelError
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.lora.targets import lora_config

__all__ = ["folder"]


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica", None, ...])
def test_starts_that_leave_the_base_alone(folder: Path, start: Any) -> None:
    change_config(folder, init_lora_weights=start)
    load_adapter(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bias": "some"}, "bias is 'some', but only none, lora_only, all are read"),
        ({"lora_bias": True}, "there is no support for a bias on lora_B"),
        ({"layer_replication": [[0, 1]]}, "replicated layers"),
        ({"target_parameters": ["x"]}, "target_parameters names x"),
        ({"use_qalora": True}, "QALoRA"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only 'LORA' is read"),
        ({"peft_type": ...}, "peft_type is None"),
        ({"task_type": "TOKEN_CLS"}, "task_type is 'TOKEN_CLS'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"init_lora_weights": "loftq"}, "changes the base"),
        ({"use_future": True}, "use_future is True, which no PEFT up to 0.21 knows"),
        ({"future_config": {"rank": 2}}, "future_config is {'rank': 2}, which no PEFT"),
    ],
)
def test_adapters_that_would_be_computed_wrongly(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    change_config(folder, **changes)
    message = refused(folder, UnsupportedModelError)
    assert message.startswith(f"{folder / 'adapter_config.json'}: ")
    assert expected in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"r": 0}, "r is 0, not a number above zero"),
        ({"r": -1}, "r is -1"),
        ({"r": "4"}, "r is '4'"),
        ({"r": True}, "r is True"),
        ({"r": None}, "r is None"),
        ({"r": ...}, "r is None"),
        ({"r": 4.5}, "r must be an integer, got 4.5"),
        ({"r": float("nan")}, "r is nan"),
        ({"lora_alpha": ...}, "lora_alpha is None"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern of 'q_proj' must be an integer, got 2.5"),
        ({"alpha_pattern": {"q_proj": -1}}, "q_proj is -1, not a number above zero"),
        ({"lora_dropout": 1}, "lora_dropout is 1, not a number from 0 to 1"),
        ({"lora_dropout": -0.1}, "lora_dropout is -0.1"),
        ({"lora_dropout": float("nan")}, "lora_dropout is nan"),
        ({"lora_dropout": "0"}, "lora_dropout is '0'"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes', not true or false"),
        ({"use_rslora": 1}, "use_rslora is 1"),
        ({"target_modules": []}, "target_modules is [], not a list of names"),
        ({"target_modules": [3]}, "target_modules is [3]"),
        ({"target_modules": {"a": 1}}, "target_modules is {'a': 1}"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path is 3"),
        ({"r": 2**31}, "r is 2147483648, not a number above zero"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj'], not numbers by names"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern of ['('] "),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', not a list of names"),
        ({"modules_to_save": ["lm_head", ""]}, "modules_to_save is ['lm_head', '']"),
        ({"modules_to_save": ["lm_head", 3]}, "modules_to_save is ['lm_head', 3]"),
        ({"target_modules": ["q_proj", ""]}, "target_modules is ['q_proj', '']"),
        ({"trainable_token_indices": 5}, "trainable_token_indices is 5, not the numbers of"),
        ({"trainable_token_indices": [5, -1]}, "trainable_token_indices is [5, -1]"),
        ({"trainable_token_indices": [5, 2**31]}, "trainable_token_indices is [5, 2147483648]"),
        ({"trainable_token_indices": [5, True]}, "trainable_token_indices is [5, True]"),
        ({"trainable_token_indices": {"lm_head": 5}}, "trainable_token_indices is {'lm_head': 5}"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices is set, but there are no rows"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set, but there is no such matrix"),
    ],
)
def test_configurations_that_are_wrong(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    change_config(folder, **changes)
    message = refused(folder)
    file = "adapter_model.safetensors" if " is set, but" in expected else "adapter_config.json"
    assert message.startswith(f"{folder / file}: ")
    assert expected in message


def test_whole_numbers_written_as_floats(folder: Path) -> None:
    change_config(folder, r=4.0, lora_alpha=8.0)
    _, config = load_adapter(folder)
    assert (config.r, config.lora_alpha) == (4, 8)
    assert (type(config.r), type(config.lora_alpha)) == (int, int)


def test_alphas_that_are_no_whole_numbers(folder: Path) -> None:
    change_config(folder, lora_alpha=8.5, alpha_pattern={"q_proj": 0.25})
    _, config = load_adapter(folder)
    assert config.scaling_of("model.layers.0.mlp.up_proj") == 8.5 / config.r
    assert config.scaling_of("model.layers.0.self_attn.q_proj") == 0.25 / config.r
    assert lora_config(config).alpha_pattern == {"q_proj": 0.25}

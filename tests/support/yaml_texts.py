"""Texts of configuration files, and what is wrong with them."""

from __future__ import annotations

import pytest

from qlora_wgpu.errors import ConfigError

MODEL = "model: {path: base}\n"


def failure(load, text, overrides=()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, overrides)
    return str(caught.value)

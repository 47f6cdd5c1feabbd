"""What most architectures have in common of their heads."""

from __future__ import annotations

import math
from typing import Any

from qlora_wgpu.checkpoint.gguf.keys import Keys
from qlora_wgpu.errors import UnsupportedModelError

Config = dict[str, Any]


def whole_heads(keys: Keys, config: Config) -> None:
    """Refuses heads of which a part is rotated."""
    keys.refuse("rope.dimension_count", config["head_dim"])


def usual_scale(keys: Keys, config: Config) -> None:
    """Refuses scores that are scaled in another way."""
    scale = keys.number("attention.scale", 0.0)
    if scale and not math.isclose(scale, config["head_dim"] ** -0.5, rel_tol=1e-5):
        raise UnsupportedModelError(
            f"{keys.where}: {keys.architecture}.attention.scale = {scale} is not computed"
        )

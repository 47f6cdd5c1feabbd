"""Image processors, read from ``preprocessor_config.json``: from RGB pixels to what a tower reads.

``layout`` needs an image's size alone, so that the tokens of a row are known without decoding its
images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.images.one_crop import (
    ClipImageProcessor,
    Gemma3ImageProcessor,
    Gemma4ImageProcessor,
    PixtralImageProcessor,
    Qwen2VLImageProcessor,
)
from qlora_wgpu.images.pixels import BICUBIC, ImageProcessor
from qlora_wgpu.images.tiles import (
    Idefics3ImageProcessor,
    Lfm2VlImageProcessor,
    LlavaNextImageProcessor,
)


def _siglip(config: Mapping[str, Any]) -> Gemma3ImageProcessor:
    """As Gemma 3's, with another filter by default."""
    return Gemma3ImageProcessor.read({**config, "resample": config.get("resample", BICUBIC)})


PROCESSORS: Mapping[str, Callable[[Mapping[str, Any]], ImageProcessor]] = {
    "Idefics3ImageProcessor": Idefics3ImageProcessor.read,
    "SmolVLMImageProcessor": Idefics3ImageProcessor.read,
    "Qwen2VLImageProcessor": Qwen2VLImageProcessor.read,
    "Gemma3ImageProcessor": Gemma3ImageProcessor.read,
    "Gemma4ImageProcessor": Gemma4ImageProcessor.read,
    "SiglipImageProcessor": _siglip,
    "CLIPImageProcessor": ClipImageProcessor.read,
    "LlavaImageProcessor": ClipImageProcessor.read,
    "LlavaNextImageProcessor": LlavaNextImageProcessor.read,
    "Lfm2VlImageProcessor": Lfm2VlImageProcessor.read,
    "PixtralImageProcessor": PixtralImageProcessor.read,
}


def read_image_processor(config: Mapping[str, Any]) -> ImageProcessor:
    """Reads preprocessor_config.json by its ``image_processor_type``.

    Raises:
        UnsupportedModelError: If the processor, or what it is set to, is not supported.
    """
    name = config.get("image_processor_type", config.get("feature_extractor_type"))
    plain = name.removesuffix("Fast").removesuffix("Pil") if isinstance(name, str) else ""
    if plain not in PROCESSORS:
        raise UnsupportedModelError(
            f"preprocessor_config.json: image_processor_type {brief(name)} is not supported "
            f"(supported: {', '.join(PROCESSORS)})"
        )
    return PROCESSORS[plain](config)

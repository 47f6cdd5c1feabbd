"""The tokens that stand for an image in a prompt, as transformers' processors write them.

A chat template writes a marker for each image. The marker becomes the model's placeholder tokens,
one for each row of the tower's features, with the tokens around them that the model expects.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qlora_wgpu.config.yaml import read_json_object
from qlora_wgpu.errors import DataError, UnsupportedModelError, brief
from qlora_wgpu.files import is_there
from qlora_wgpu.images.one_crop import (
    ClipImageProcessor,
    Gemma3ImageProcessor,
    Gemma4ImageProcessor,
    PixtralImageProcessor,
    Qwen2VLImageProcessor,
)
from qlora_wgpu.images.pixels import ImageProcessor, Tiles
from qlora_wgpu.images.processors import read_image_processor
from qlora_wgpu.images.sources import ImageSource
from qlora_wgpu.images.tiles import Lfm2VlImageProcessor, LlavaNextImageProcessor

Pieces = Sequence[str | int]
"""Text, and numbers of placeholders."""
Expand = Callable[[int, int], Pieces]
"""What stands for an image of a height and width."""

# ---- expansion -----------------------------------------------------------------------------------


class ExpandedText(NamedTuple):
    """A text whose markers are replaced; each run of placeholders is still a single one."""

    text: str
    spans: list[tuple[int, int]]  # of what stands for each image, in characters
    runs: list[int]  # how many placeholders each of them stands for

    def moved(self, spans: Sequence[tuple[int, int]], marker: int) -> list[tuple[int, int]]:
        """Spans of the original text in this one, without images.

        ``marker`` is the length of the markers that were replaced.
        """
        pieces, shift, begin = [], 0, 0  # the text between images, and how far it was moved
        for first, last in self.spans:
            pieces.append((begin, first, shift))
            shift, begin = shift + last - first - marker, last
        pieces.append((begin, len(self.text), shift))
        return [
            (max(first + shift, begin), min(last + shift, end))
            for first, last in spans
            for begin, end, shift in pieces
            if max(first + shift, begin) < min(last + shift, end)
        ]


@dataclass(frozen=True)
class ImageTokens:
    """How a model's prompts contain images."""

    marker: str  # what chat templates write for an image
    mark: str  # what is written for it in rows without a chat template
    token: str  # the placeholder
    token_id: int  # its id
    processor: ImageProcessor  # the pixels that the tower reads
    expand: Expand

    def expanded(self, text: str, images: Sequence[ImageSource]) -> ExpandedText:
        """A rendered text with what stands for its images.

        Raises:
            DataError: If it does not have a marker for each image.
        """
        parts = text.split(self.marker)
        if len(parts) - 1 != len(images):
            raise DataError(
                f"the rendered text has {len(parts) - 1} image markers ({self.marker}), but the "
                f"row has {counted(len(images))}: check that data.chat_template writes one for "
                "each image, and that no text contains the marker"
            )
        whole, spans, runs = parts[0], list[tuple[int, int]](), list[int]()
        for image, part in zip(images, parts[1:], strict=True):
            pieces = self.pieces(image)
            runs += [piece for piece in pieces if isinstance(piece, int)]
            begin = len(whole)
            whole += "".join(self.token if isinstance(piece, int) else piece for piece in pieces)
            spans.append((begin, len(whole)))
            whole += part
        return ExpandedText(whole, spans, runs)

    def pieces(self, image: ImageSource) -> Pieces:
        """What stands for an image."""
        try:
            return self.expand(image.height, image.width)
        except UnsupportedModelError as err:
            raise DataError(f"{image.name}: {err}") from err

    def count(self, image: ImageSource) -> int:
        """The number of an image's placeholders: rows of its features."""
        return sum(piece for piece in self.pieces(image) if isinstance(piece, int))

    def repeats(self, ids: Sequence[int], runs: Sequence[int]) -> Any:
        """How often each token of an expanded text is repeated.

        Raises:
            DataError: If the tokenizer does not keep the placeholder as one token.
        """
        counts = np.ones(len(ids), np.int64)
        is_image = np.asarray(ids) == self.token_id
        if is_image.sum() != len(runs):
            raise DataError(
                f"the tokenizer encodes {len(runs)} placeholders {self.token} as "
                f"{int(is_image.sum())} tokens of the id {self.token_id} (config.json): put the "
                "model's own tokenizer.json into its folder"
            )
        counts[is_image] = runs
        return counts


def counted(images: int) -> str:
    """A number of images in words."""
    return "1 image" if images == 1 else f"{images} images"


# ---- families ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """What a family reads: config.json, the processor's settings and the tokenizer's tokens."""

    config: Mapping[str, Any]
    settings: Mapping[str, Any]  # processor_config.json
    image_settings: Mapping[str, Any]  # preprocessor_config.json
    token_of: Callable[[int], str | None]

    def id(self, name: str, default: int) -> int:
        """A token's id, ``image_token_id`` or by its older name ``image_token_index``."""
        for key in (f"{name}_id", f"{name}_index"):
            value = self.config.get(key)
            if value is not None:
                if type(value) is not int or value < 0:
                    raise UnsupportedModelError(f"config.json: {key} is {brief(value)}")
                return value
        return default

    def token(self, name: str, default: int) -> str:
        """The text of such a token."""
        number = self.id(name, default)
        text = self.token_of(number)
        if text is None:
            raise UnsupportedModelError(
                f"the tokenizer has no token with the id {number} ({name}_id in config.json)"
            )
        return text

    def count(self, key: str, default: int) -> int:
        """A number of the processor's settings."""
        value = self.settings.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 <= value <= 1 << 20:
            raise UnsupportedModelError(
                f"processor_config.json: {key} must be an integer, got {brief(value)}"
            )
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of config.json; empty if it is missing."""
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}

    @cached_property
    def processor(self) -> ImageProcessor:
        """The image processor."""
        return read_image_processor(self.image_settings)

    def image_tokens(
        self, default: int, expand: Expand, marker: str = "", around: tuple[str, str] = ("", "")
    ) -> ImageTokens:
        """The family's, by the default id of its placeholder.

        The marker is the placeholder itself by default; ``around`` is what chat templates write
        before and after it.
        """
        token, (begin, end) = self.token("image_token", default), around
        marker = marker or token
        number = self.id("image_token", default)
        return ImageTokens(marker, begin + marker + end, token, number, self.processor, expand)


def _idefics3(files: _Files) -> ImageTokens:
    per_tile, fake = files.count("image_seq_len", 169), "<fake_token_around_image>"

    def expand(height: int, width: int) -> Pieces:
        layout = files.processor.layout(height, width)
        assert isinstance(layout, Tiles)
        pieces: list[str | int] = []
        for row in range(layout.rows):
            for column in range(layout.columns):
                pieces += [f"{fake}<row_{row + 1}_col_{column + 1}>", per_tile]
            pieces.append("\n")
        begin = f"\n{fake}" if layout.rows else fake
        return [*pieces, f"{begin}<global-img>", per_tile, fake]

    return files.image_tokens(128_257, expand)


def _llava(files: _Files) -> ImageTokens:
    patch, others = _patches_of_tower(files)
    processor = files.processor
    if not isinstance(processor, ClipImageProcessor | Gemma3ImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json: its images have no fixed size")

    def expand(height: int, width: int) -> Pieces:
        tall, wide = processor.output_size(height, width)
        return [(tall // patch) * (wide // patch) + others]

    return files.image_tokens(32_000, expand)


def _llava_next(files: _Files) -> ImageTokens:
    patch, others = _patches_of_tower(files)
    processor = files.processor
    if not isinstance(processor, LlavaNextImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json is not one of LLaVA-NeXT's")

    def expand(height: int, width: int) -> Pieces:
        layout, side = processor.layout(height, width), processor.finish.crop[0] // patch
        tall, wide = layout.rows * side, layout.columns * side
        if width / height > wide / tall:  # the padding is left out
            tall -= (tall - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (tall / height), 7))) // 2 * 2
        return [side * side + others + tall * wide + tall]

    return files.image_tokens(32_000, expand)


def _mistral3(files: _Files) -> ImageTokens:
    patch = files.count("patch_size", files.section("vision_config").get("patch_size") or 14)
    merge = files.count("spatial_merge_size", files.config.get("spatial_merge_size") or 2)
    unit, read = patch * merge, files.processor
    if not isinstance(read, PixtralImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json is not one of Pixtral's")
    processor = replace(read, patch_size=unit)  # as PixtralProcessor sets it
    ends = [files.settings.get(key) or default for key, default in _PIXTRAL_TOKENS]

    def expand(height: int, width: int) -> Pieces:
        layout = processor.layout(height, width)
        pieces: list[str | int] = []
        for row in range(layout.rows):
            pieces += [layout.columns, str(ends[row + 1 == layout.rows])]
        return pieces

    return replace(files.image_tokens(10, expand), processor=processor)


_PIXTRAL_TOKENS = (("image_break_token", "[IMG_BREAK]"), ("image_end_token", "[IMG_END]"))


def _lfm2_vl(files: _Files) -> ImageTokens:
    processor = files.processor
    if not isinstance(processor, Lfm2VlImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json is not one of LFM2-VL's")
    framed = files.settings.get("use_image_special_tokens") is not False
    unit = processor.unit

    def expand(height: int, width: int) -> Pieces:
        layout, per_tile = processor.layout(height, width), (processor.tile // unit) ** 2
        tall, wide = processor.whole_size(height, width)
        pieces: list[str | int] = ["<|image_start|>"]
        for row in range(layout.rows):
            for column in range(layout.columns):
                if layout.rows * layout.columns > 1:
                    pieces.append(f"<|img_row_{row + 1}_col_{column + 1}|>")
                pieces.append(per_tile)
        if processor.is_whole_read(layout):
            pieces += ["<|img_thumbnail|>"] if layout.rows else []
            pieces.append(tall // unit * (wide // unit))
        pieces.append("<|image_end|>")
        return pieces if framed else [piece for piece in pieces if isinstance(piece, int)]

    return files.image_tokens(396, expand)


def _patches_of_tower(files: _Files) -> tuple[int, int]:
    """The side of a patch, and how many features there are besides those of patches."""
    vision = files.section("vision_config")
    patch = files.count("patch_size", vision.get("patch_size") or 14)
    strategy = files.settings.get("vision_feature_select_strategy")
    strategy = strategy or files.config.get("vision_feature_select_strategy") or "default"
    has_class = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    others = files.count("num_additional_image_tokens", int(has_class))
    if strategy not in ("default", "full"):
        raise UnsupportedModelError(
            f"vision_feature_select_strategy {brief(strategy)} is not supported (supported: "
            "default, full)"
        )
    return patch, others - (strategy == "default")


def _gemma3(files: _Files) -> ImageTokens:
    begin, end = files.token("boi_token", 255_999), files.token("eoi_token", 256_000)
    count = files.count("image_seq_length", files.config.get("mm_tokens_per_image") or 256)
    pieces: Pieces = (f"\n\n{begin}", count, f"{end}\n\n")
    return files.image_tokens(262_144, lambda *_: pieces, begin)


def _gemma4(files: _Files) -> ImageTokens:
    processor = files.processor
    if not isinstance(processor, Gemma4ImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json is not one of Gemma 4's")
    begin, end = files.token("boi_token", 255_999), files.token("eoi_token", 258_882)

    def expand(height: int, width: int) -> Pieces:
        layout = processor.layout(height, width)
        return [begin, layout.rows * layout.columns // processor.pooling_kernel_size**2, end]

    return files.image_tokens(258_880, expand)


def _qwen_vl(files: _Files, ids: tuple[int, int, int] = (151_655, 151_652, 151_653)) -> ImageTokens:
    """``ids`` are the default ids of the placeholder and of what comes before and after it."""
    processor = files.processor
    if not isinstance(processor, Qwen2VLImageProcessor):
        raise UnsupportedModelError("preprocessor_config.json is not one of Qwen's")

    def expand(height: int, width: int) -> Pieces:
        layout = processor.layout(height, width)
        return [layout.rows * layout.columns // processor.merge_size**2]

    number, begin, end = ids
    around = files.token("vision_start_token", begin), files.token("vision_end_token", end)
    return files.image_tokens(number, expand, around=around)


def _qwen3_5(files: _Files) -> ImageTokens:
    return _qwen_vl(files, (248_056, 248_053, 248_054))


_FAMILIES: Mapping[str, Callable[[_Files], ImageTokens]] = {
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "lfm2_vl": _lfm2_vl,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
}

# ---- a model's folder ----------------------------------------------------------------------------

_PROCESSOR, _IMAGES = "processor_config.json", "preprocessor_config.json"


class ImageFiles:
    """The files of a model that say how its prompts contain images; read at the first image."""

    def __init__(
        self, folder: Path, config: Mapping[str, Any], token_of: Callable[[int], str | None]
    ) -> None:
        self.folder = folder
        self._config = config
        self._token_of = token_of

    @property
    def are_known(self) -> bool:
        """Whether the model is of a family whose images are supported."""
        return self._config.get("model_type") in _FAMILIES

    @cached_property
    def tokens(self) -> ImageTokens:
        """How the model's prompts contain images.

        Raises:
            UnsupportedModelError: If they do not, or a file is missing or not supported.
        """
        kind = str(self._config.get("model_type"))
        if kind not in _FAMILIES:
            raise UnsupportedModelError(
                f"images are not supported for model_type {brief(kind)} (supported: "
                f"{', '.join(_FAMILIES)})"
            )
        settings, images = self._settings
        if not images:
            raise UnsupportedModelError(
                f"{self.folder} has no {_IMAGES}, which images require: copy it from the base model"
            )
        return _FAMILIES[kind](_Files(self._config, settings, images, self._token_of))

    @cached_property
    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The processor's settings, and those of its image processor."""
        settings = _object(self.folder / _PROCESSOR)
        images = settings.pop("image_processor", None)
        if not isinstance(images, dict):  # as transformers 4 wrote them
            images = _object(self.folder / _IMAGES)
        return settings, images

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that an image's tokens depend on, besides the tokenizer."""
        kept = {
            key: value for key, value in self._config.items()
            if key == "model_type" or key.endswith(("_token_id", "_token_index"))
            or key in ("vision_config", "vision_feature_select_strategy", "mm_tokens_per_image")
        }  # fmt: skip
        content = json.dumps([kept, *self._settings], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def image_files(
    folder: Path, config: Mapping[str, Any], token_of: Callable[[int], str | None]
) -> ImageFiles | None:
    """How the prompts of a model contain images; None if it is of no family that reads them."""
    files = ImageFiles(folder, config, token_of)
    return files if files.are_known else None


def _object(path: Path) -> dict[str, Any]:
    return read_json_object(path, error=UnsupportedModelError) if is_there(path) else {}

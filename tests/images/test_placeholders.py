"""Files of models whose images cannot be read are refused in a sentence."""

import re
from pathlib import Path

import pytest
from support.image_models import FAMILIES

from qlora_wgpu.errors import DataError, UnsupportedModelError
from qlora_wgpu.images.placeholders import ExpandedText, ImageFiles, _Files, image_files
from qlora_wgpu.images.sources import ImageSource, RowContent

IDS = {"image_token_id": 7, "boi_token_id": 8, "eoi_token_id": 9, "vision_start_token_id": 8,
       "vision_end_token_id": 9}  # fmt: skip


def tokens_of(family, config=None, settings=None, images=None):
    files = ImageFiles(
        Path("F"),
        {"model_type": family, **FAMILIES[family].get("config", {}), **IDS, **(config or {})},
        lambda number: f"<{number}>",
    )
    parts = FAMILIES[family]
    files.__dict__["_settings"] = (
        {**parts["processor"], **(settings or {})},
        {**parts["images"], **({} if images is None else images)} if images != {} else {},
    )
    return files.tokens


def counts(tokens, height, width):
    return [piece for piece in tokens.expand(height, width) if isinstance(piece, int)]


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({}, {}, [16]),  # 4 · 4 patches, with the class's and without it again
        ({}, {"vision_feature_select_strategy": "full"}, [17]),
        ({}, {"num_additional_image_tokens": 0}, [15]),
        ({}, {"num_additional_image_tokens": None}, [16]),
        ({"vision_config": {"model_type": "siglip_vision_model"}},
         {"num_additional_image_tokens": None, "vision_feature_select_strategy": "full"}, [16]),
        ({"vision_config": {}}, {"num_additional_image_tokens": None}, [16]),
        ({"vision_config": {"patch_size": 28}}, {"patch_size": None}, [4]),
        ({"vision_config": {}}, {"patch_size": None}, [16]),
        ({"vision_feature_select_strategy": "full"},
         {"vision_feature_select_strategy": None}, [17]),
        ({"vision_feature_select_strategy": None},
         {"vision_feature_select_strategy": None}, [16]),
    ],
)  # fmt: skip
def test_features_besides_those_of_patches(config, settings, expected):
    assert counts(tokens_of("llava", config, settings), 30, 40) == expected


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((40, 60), 4, 6),
        ((20, 80), 2, 8),
        ((80, 20), 8, 2),
        ((300, 200), 8, 6),
        ((97, 97), 8, 8),
        ((56, 112), 4, 8),
        ((25, 112), 2, 8),
    ],
)
def test_padding_of_llava_next_s_tiles_has_no_placeholders(size, rows, columns):
    """A row of features ends with a placeholder of its own; the whole image has 16."""
    assert counts(tokens_of("llava_next"), *size) == [16 + rows * columns + rows]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llava", {"settings": {"vision_feature_select_strategy": "all"}}, "'all' is not supp"),
        ("llava", {"settings": {"patch_size": 14.0}}, "patch_size must be an integer, got 14.0"),
        ("llava", {"settings": {"patch_size": -1}}, "patch_size must be an integer, got -1"),
        ("llava", {"settings": {"patch_size": (1 << 20) + 1}}, "patch_size must be an integer"),
        ("llava", {"images": {"image_processor_type": "Qwen2VLImageProcessor"}}, "no fixed size"),
        ("llava_next", {"images": {"image_processor_type": "CLIPImageProcessor"}}, "LLaVA-NeXT's"),
        ("mistral3", {"images": {"image_processor_type": "Gemma3ImageProcessor", "size": 8}},
         "not one of Pixtral's"),
        ("lfm2_vl", {"images": {"image_processor_type": "Gemma3ImageProcessor"}}, "LFM2-VL's"),
        ("gemma4", {"images": {"image_processor_type": "Gemma3ImageProcessor"}}, "Gemma 4's"),
        ("qwen2_vl", {"images": {"image_processor_type": "Gemma3ImageProcessor", "size": 8}},
         "not one of Qwen's"),
        ("llava", {"config": {"image_token_id": -1}}, "image_token_id is -1"),
        ("llava", {"config": {"image_token_id": None, "image_token_index": "7"}},
         "image_token_index is '7'"),
        ("llava", {"images": {}}, "F has no preprocessor_config.json, which images require"),
    ],
)  # fmt: skip
def test_files_that_do_not_go_together(family, changes, message):
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        tokens_of(family, **changes)


def test_a_model_without_images():
    plain = ImageFiles(Path("F"), {"model_type": "llama"}, str)
    assert not plain.are_known and image_files(Path("F"), {"model_type": "llama"}, str) is None
    assert image_files(Path("F"), {"model_type": "llava"}, str).are_known
    with pytest.raises(UnsupportedModelError, match="not supported for model_type 'llama'"):
        _ = plain.tokens


def test_ids_have_an_older_name_and_a_default():
    def files(**config):
        return _Files(config, {}, {}, {5: "five"}.get)

    assert files(image_token_id=5, image_token_index=6).id("image_token", 1) == 5
    assert files(image_token_id=None, image_token_index=6).id("image_token", 1) == 6
    assert files().id("image_token", 1) == 1 and files(image_token_id=0).id("image_token", 1) == 0
    assert files().token("image_token", 5) == "five"
    with pytest.raises(UnsupportedModelError, match=r"no token with the id 6 \(image_token_id in"):
        files().token("image_token", 6)
    assert files().count("a", 3) == 3 and files(a=1).section("a") == {}


def test_lfm2_s_images_without_frames():
    framed, plain = (
        tokens_of("lfm2_vl", settings={"use_image_special_tokens": value})
        for value in (None, False)
    )
    both = [tokens.expand(97, 97) for tokens in (framed, plain)]
    assert both[0] == [
        "<|image_start|>",
        *(part for r in (1, 2) for c in (1, 2) for part in (f"<|img_row_{r}_col_{c}|>", 16)),
        "<|img_thumbnail|>", 9, "<|image_end|>",
    ]  # fmt: skip
    assert both[1] == [16] * 4 + [9]
    assert framed.expand(40, 60) == ["<|image_start|>", 8, "<|image_end|>"]


def test_other_spans_move_with_images():
    """What stands for an image is longer than its marker, which no span contains any more."""
    expanded = ExpandedText("ab<IMAGE>cd<IMAGE>e", [(2, 9), (11, 18)], [1, 1])
    text = "ab*cd*e"
    assert expanded.moved([(0, 2), (3, 5), (6, 7)], 1) == [(0, 2), (9, 11), (18, 19)]
    assert expanded.moved([(0, len(text))], 1) == [(0, 2), (9, 11), (18, 19)]
    assert expanded.moved([(1, 4)], 1) == [(1, 2), (9, 10)]
    assert expanded.moved([(2, 3)], 1) == []


def test_an_image_s_placeholders_are_counted_and_its_mistakes_named():
    tokens = tokens_of("qwen2_vl")
    image = ImageSource("image 1", RowContent(b""), "k", 56, 84)
    assert tokens.count(image) == 6
    with pytest.raises(DataError, match="image 1: an image of 4000 x 10 pixels is too narrow"):
        tokens.pieces(ImageSource("image 1", RowContent(b""), "k", 10, 4000))
    assert tokens.repeats([1, 7, 2], [6]).tolist() == [1, 6, 1]
    with pytest.raises(DataError, match=r"encodes 2 placeholders <7> as 1 tokens of the id 7"):
        tokens.repeats([1, 7, 2], [6, 6])

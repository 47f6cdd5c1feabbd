"""Forms of quantized weights: by a quantization_config alone, and by the shapes of tensors."""

from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.checkpoint import atomic, manifest, tokenizer_files
from qlora_wgpu.checkpoint.gguf_file import _check_parts
from qlora_wgpu.checkpoint.gguf_tokenizer import _Vocabulary
from qlora_wgpu.checkpoint.quantized import PlannedFormats, _is_skipped, _size
from qlora_wgpu.checkpoint.quantized.group_weights import AwqWeight, GptqWeight, Groups, _count
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.quant import safetensors_formats as formats
from qlora_wgpu.quant.nf4 import nf4_format
from qlora_wgpu.weight_format import WHOLE


@pytest.mark.parametrize(("module", "key", "skipped"), [
    ("model.layers.1.mlp", "mlp", True), ("model.layers.1.mlp", "layers.1", True),
    ("model.layers.1.mlp", "lp", True), ("model.layers.1.mlp", "ml", False),
    ("model.layers.1.mlp", "layers", True), ("model.layers.1.mlp", "model.layers.*.mlp", True),
    ("model.layers.1.mlp", "layers.*", True), ("model.layers.1.mlp", "layers.2*", False),
    ("lm_head", "lm_head", True), ("lm_head", "head", True), ("lm_head", "lm", False),
])  # fmt: skip
def test_which_layers_are_not_quantized(module, key, skipped):
    assert _is_skipped(module, key) == skipped


@pytest.mark.parametrize(("value", "size"), [
    (1, 1), (-1, -1), (0, 9), (-2, 9), (True, 9), ("4", 9), (None, 9), (4.0, 9),
])  # fmt: skip
def test_sizes_of_a_quantization_config(value, size):
    assert _size({"bits": value}, "bits", 9) == size and _size({}, "bits", 9) == 9


FP8 = formats.fp8_format


@pytest.mark.parametrize(("config", "form"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 64]}, FP8("F8_E4M3", (128, 64))),
    ({"quant_method": "fp8", "weight_block_size": [128]}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "fp8", "weight_block_size": [128, "4"]}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "fp8", "weight_block_size": (128, 64)}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "fp8"}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "fbgemm_fp8"}, FP8("F8_E4M3", (1, WHOLE))),
    ({"quant_method": "mxfp8"}, FP8("F8_E4M3", (1, 32))),
    ({"quant_method": "mxfp4"}, formats.MXFP4),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, formats.NVFP4),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, formats.INT8),
    ({"quant_method": "bitsandbytes", "_load_in_8bit": True}, formats.INT8),
    ({"load_in_4bit": True}, nf4_format(64, False)),
    ({"bnb_4bit_use_double_quant": True}, nf4_format(64, True)),
    ({"bnb_4bit_use_double_quant": 1}, nf4_format(64, False)),
    ({"quant_method": "gptq", "bits": 4, "group_size": 32},
     formats.group_format("GPTQ", 4, 256, 32)),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1},
     formats.group_format("GPTQ", 8, 256, -1)),
    ({"quant_method": "gptq", "bits": 3}, formats.group_format("GPTQ", 4, 256, 128)),
    ({"quant_method": "gptq", "bits": 9}, None),
    ({"quant_method": "awq", "bits": 4, "group_size": 64},
     formats.group_format("AWQ", 4, 256, 64)),
])  # fmt: skip
def test_formats_without_weights(config, form):
    made = PlannedFormats(config)._format("model.layers.0.q_proj", 256)
    assert repr(made) == repr(form)  # which are equal to themselves alone


def test_a_layer_of_its_own_bits():
    own = {"a": {"bits": 8}, "b": {"bits": 16}, "c": 4}
    planned = PlannedFormats({"quant_method": "gptq", "bits": 4, "extra_config": own})
    made = {name: repr(planned._format(name, 256)) for name in "abcd"}
    assert made["a"] == repr(formats.group_format("GPTQ", 8, 256, 128)) and made["b"] == "None"
    assert made["c"] == made["d"] == repr(formats.group_format("GPTQ", 4, 256, 128))


class Shapes:
    """Tensors of a layer, of which only shapes are known."""

    def __init__(self, kind, groups, **shapes):
        self.made = kind.__new__(kind)
        self.made._groups = groups
        self.made.__class__ = type("Shaped", (kind,), {
            "_has": lambda own, leaf: leaf in shapes, "_matrix": lambda own, leaf: shapes[leaf],
        })  # fmt: skip


@pytest.mark.parametrize(("kind", "differ", "shapes", "bits", "size"), [
    (GptqWeight, True, {"qweight": (32, 64), "qzeros": (8, 8), "scales": (8, 64)}, 4, 32),
    (GptqWeight, True, {"qweight": (32, 64), "qzeros": (8, 16), "scales": (8, 64)}, 8, 16),
    (GptqWeight, False, {"qweight": (32, 64), "qzeros": (8, 16), "scales": (8, 64)}, 4, 128),
    (GptqWeight, True, {"qweight": (32, 64), "qzeros": (1, 4), "scales": (1, 64)}, 2, -1),
    (GptqWeight, True, {"qweight": (32, 64), "qzeros": (7, 5), "scales": (7, 64)}, 4, 128),
    (GptqWeight, True, {"qweight": (32, 64), "scales": (2, 64)}, 4, 128),
    (GptqWeight, True, {"qweight": (32, 64), "scales": (0, 64)}, 4, 128),
    (GptqWeight, True, {"qweight": (32, 64), "qzeros": (8, 16)}, 4, 128),
    (AwqWeight, True, {"qweight": (256, 8), "qzeros": (4, 8), "scales": (4, 64)}, 4, 64),
])  # fmt: skip
def test_layers_that_differ_show_it_by_their_shapes(kind, differ, shapes, bits, size):
    made = Shapes(kind, Groups(4, 128, differ, less_one=False), **shapes).made
    assert (made._bits, made._group_size) == (bits, size)
    columns = shapes["qweight"][0] if kind is AwqWeight else 32 * 32 // bits
    assert made.shape == (64, columns)


@pytest.mark.parametrize(("less_one", "bits", "zeros"), [
    (False, 4, [1, 2, 15, 0, 0, 0, 0, 0]), (True, 4, [2, 3, 0, 1, 1, 1, 1, 1]),
    (True, 8, [34, 16, 1, 1]),
])  # fmt: skip
def test_zero_points_may_be_stored_minus_one(less_one, bits, zeros):
    made = Shapes(GptqWeight, Groups(bits, 128, False, less_one)).made
    words = np.array([[0x0F21]], np.int32)
    assert made._zeros(words).tolist() == [zeros]


@pytest.mark.parametrize(("columns", "group", "count"), [
    (256, -1, 1), (256, 128, 2), (257, 128, 3), (1, 128, 1),
])  # fmt: skip
def test_a_last_group_may_be_short(columns, group, count):
    assert _count(columns, group) == count


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "good"), [
    ([(None, None)], True), ([(0, 0)], True), ([(1, 0)], True), ([(1, 5)], True),
    ([(2, 0)], False), ([(2, 0), (2, 1)], True), ([(2, 1), (2, 0)], False),
    ([(2, 0), (3, 1)], False), ([(None, None)] * 2, False),
])  # fmt: skip
def test_parts_of_a_file_are_numbered(parts, good):
    headers = [
        SimpleNamespace(metadata={"split.count": count, "split.no": place})
        for count, place in parts
    ]
    paths = [f"part{number}" for number in range(len(parts))]
    if good:
        _check_parts(paths, headers)
        return
    with pytest.raises(CheckpointError, match=r"is part .* of .* by its metadata, but part "):
        _check_parts(paths, headers)


@pytest.mark.parametrize(("number", "found"), [
    (0, 0), (2, 2), (3, None), (-1, None), (True, None), (1.0, None), (None, None),
])  # fmt: skip
def test_special_tokens_are_tokens_of_the_file(number, found):
    made = SimpleNamespace(_values={"bos_token_id": number}, _tokens=["a", "b", "c"])
    assert _Vocabulary._special_id(made, "bos") == found


def test_a_hash_of_a_manifest_does_not_depend_on_the_order():
    one, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert manifest._hash_of(one) == manifest._hash_of(other)
    assert manifest._hash_of(one) != manifest._hash_of({**one, "a": 2})


@pytest.mark.parametrize("most", [1, 3, 100])
def test_partial_writes_are_continued(most):
    written = bytearray()

    def write(data):
        written.extend(data[:most])
        return len(data[:most])

    atomic._write_all(SimpleNamespace(write=write), b"0123456789")
    assert written == b"0123456789"
    for nothing in (0, None):
        answers = iter([nothing])
        with pytest.raises(OSError, match="No space left"):
            atomic._write_all(SimpleNamespace(write=lambda data, a=answers: next(a)), b"0")


@pytest.mark.parametrize(("content", "end"), [
    (b"", 0), (b"a\n", 2), (b"a\nb", 2), (b"a", 0), (b"a\nb\n", 4), (b"\n", 1),
])  # fmt: skip
def test_where_whole_lines_end(tmp_path, content, end):
    (tmp_path / "log").write_bytes(content)
    with (tmp_path / "log").open("rb") as file:
        assert atomic._end_of_lines(file) == end


@pytest.mark.parametrize("templates", [False, True])
def test_a_tokenizer_is_copied_with_its_templates_or_without(tmp_path, templates):
    source, target = tmp_path / "source", tmp_path / "target"
    more = source / tokenizer_files.MORE_TEMPLATES
    more.mkdir(parents=True)
    target.mkdir()
    tokens = ["tokenizer.json", tokenizer_files.CONFIG]
    prompts = [tokenizer_files.GENERATION, tokenizer_files.PROMPT_FORMAT]
    for name in [*tokens, *prompts, tokenizer_files.TEMPLATE, "model.safetensors"]:
        (source / name).write_text(name)
    (more / "tools.jinja").write_text("a template")
    tokenizer_files.copy_tokenizer(source, target, templates=templates)
    found = {path.name for path in target.rglob("*") if path.is_file()}
    assert found == {*tokens, *([tokenizer_files.TEMPLATE, "tools.jinja"] if templates else [])}
    tokenizer_files.copy_prompt_files(source, target)
    found = {path.name for path in target.rglob("*") if path.is_file()}
    assert found == {*tokens, *prompts, tokenizer_files.TEMPLATE, "tools.jinja"}

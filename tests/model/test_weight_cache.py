"""Layers that come and go are files' own bytes, or kept on disk; the bits are those of memory."""

import os
import shutil
from collections import namedtuple

import numpy as np
import pytest
from e2e.tiny import write_model as write_folder
from gguf import GGMLQuantizationType as Type
from support.gguf_files import byte_vocabulary, random_weights, write_model

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.cache_folder import cache_path
from qlora_wgpu.exporting.folders import quantize_folder
from qlora_wgpu.graph.offload import WeightStream
from qlora_wgpu.mapped_files import is_mapped
from qlora_wgpu.model.offload_plan import OffloadPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.model.weight_cache import FlatLayer

LAYERS = 4
STREAMED = OffloadPlan(host_embedding=True, streamed_layers=3)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    return write_folder(
        path / "floats", num_hidden_layers=LAYERS, tie_word_embeddings=False, hidden_size=64,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        store="bfloat16",
    )  # fmt: skip


@pytest.fixture(scope="module")
def four_bit(folder):
    quantize_folder(folder, folder.parent / "nf4")
    return folder.parent / "nf4"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("qlora_wgpu.model.weight_cache._LEFT_FREE", 0)
    monkeypatch.setattr("qlora_wgpu.model.weight_placement._LEAST_KEPT", 1)
    return cache_path("weights")


@pytest.fixture
def quantized(monkeypatch):
    """The matrices that are quantized from now on."""
    from qlora_wgpu.model import checkpoint_reader

    shapes, original = [], checkpoint_reader.quantize_nf4

    def quantize(weight, *form):
        shapes.append(weight.shape)
        return original(weight, *form)

    monkeypatch.setattr(checkpoint_reader, "quantize_nf4", quantize)
    return shapes


def laid_out(folder, device, *, keep=True, offload=STREAMED):
    pretrained = Pretrained.open(folder)
    return device_layout(
        pretrained, LoraConfig(r=4), QuantConfig(), "bfloat16", device, offload, keep=keep
    )


def computed(layout, device):
    """Logits of some tokens, and the layout that gave them."""
    with QLoRAModel(layout, device) as model:
        return model.logits(np.arange(12).reshape(1, 12)), layout


def loaded(layout, device):
    """The bytes of what comes and goes."""
    layout.load(device)
    return b"".join(piece.tobytes() for piece in pieces(layout))


def pieces(layout):
    groups = layout.placement.stream.groups
    return [piece for group in groups for piece in group.chunks.values()]


@pytest.fixture(scope="module")
def expected(folder, device):
    return computed(laid_out(folder, device, keep=False, offload=OffloadPlan()), device)[0]


@pytest.mark.slow
def test_layers_are_quantized_once(folder, device, cache, quantized, expected):
    layout = laid_out(folder, device)
    assert "streamed weights" not in layout.weights_on_host()
    assert layout.placement.mapped_bytes == sum(layout.placement.group_bytes) + 83 * 64 * 2
    first, _ = computed(layout, device)
    assert len(quantized) == 7 * LAYERS and all(map(is_mapped, pieces(layout)))
    quantized.clear()
    second, layout = computed(laid_out(folder, device), device)
    assert not quantized and layout.placement.problem == ""
    # Another budget, or none, takes the same files.
    with_head = OffloadPlan(streamed_layers=LAYERS, streamed_head=True)
    for offload in (with_head, OffloadPlan()):
        np.testing.assert_array_equal(
            computed(laid_out(folder, device, offload=offload), device)[0], expected
        )
    assert not quantized and len(list(cache.iterdir())) == 1
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)


def test_a_damaged_file_is_made_anew(folder, device, cache, quantized):
    expected = loaded(laid_out(folder, device), device)
    files = sorted(cache.glob("*/*.bin"))
    assert len(files) == LAYERS
    files[0].write_bytes(files[0].read_bytes()[:-1])  # torn
    damaged = bytearray(files[1].read_bytes())
    damaged[5000] ^= 1
    files[1].write_bytes(damaged)
    files[2].write_bytes(files[3].read_bytes()[:4096] + files[2].read_bytes()[4096:])  # another's
    shutil.copyfile("/dev/null", files[3])
    quantized.clear()
    assert loaded(laid_out(folder, device), device) == expected
    assert len(quantized) == 7 * LAYERS
    quantized.clear()
    assert loaded(laid_out(folder, device), device) == expected
    assert not quantized
    files[0].rename(cache / "aside")  # as whole as before, and of other layers
    files[1].rename(files[0])
    (cache / "aside").rename(files[1])
    assert loaded(laid_out(folder, device), device) == expected
    assert len(quantized) == 7 * 2


def test_other_weights_have_other_files(folder, device, cache, quantized, tmp_path):
    loaded(laid_out(folder, device), device)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = other / "model.safetensors"
    content, times = bytearray(weights.read_bytes()), weights.stat()
    content[-64:] = bytes(64)
    weights.write_bytes(content)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    quantized.clear()
    loaded(laid_out(other, device), device)
    assert len(quantized) == 7 * LAYERS and len(list(cache.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["no room", "full in the middle", "not writable"])
def test_without_a_disk_layers_wait_in_memory(
    folder, device, cache, monkeypatch, expected, failing
):
    if failing == "no room":
        monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(9, 9, 9))
    elif failing == "full in the middle":
        original, written = os.replace, []

        def replace(source, target):
            written.append(target)
            if len(written) > 2:
                raise OSError(28, "No space left on device")
            original(source, target)

        monkeypatch.setattr("os.replace", replace)
        monkeypatch.setattr("pathlib.Path.replace", lambda self, to: replace(self, to))
    else:
        cache.parent.mkdir()
        cache.write_text("")
    layout = laid_out(folder, device)
    got, _ = computed(layout, device)
    np.testing.assert_array_equal(got, expected)
    assert (
        "cannot be cached in" in layout.placement.problem
        and "free disk space" in layout.placement.problem
    )
    assert not all(map(is_mapped, pieces(layout)))
    if failing == "no room":
        assert layout.weights_on_host()["streamed weights"] == sum(layout.placement.group_bytes)
        assert layout.placement.mapped_bytes == 83 * 64 * 2  # the embedding is as its file has it


def test_a_4_bit_folder_serves_its_own_bytes(four_bit, device, cache, quantized, expected):
    layout = laid_out(four_bit, device)
    got, _ = computed(layout, device)
    np.testing.assert_array_equal(got, expected)
    assert not quantized and not cache.exists()
    in_memory = sum(piece.nbytes for piece in pieces(layout) if not is_mapped(piece))
    assert (
        in_memory
        <= layout.weights_on_host()["streamed weights"]
        < sum(layout.placement.group_bytes) / 2
    )


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A base of which one kernel reads most, and of which some layers have to be quantized anew."""
    folder = tmp_path_factory.mktemp("gguf")
    config = {
        "model_type": "llama", "vocab_size": 280, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    types = {"attn_v.weight": Type.Q4_0, "blk.1.ffn_down.weight": Type.TQ2_0,
             "blk.3.ffn_up.weight": Type.TQ2_0}  # fmt: skip
    keys = byte_vocabulary()
    return write_model(
        folder / "base.gguf", config, random_weights(config), keys=keys, types=types,
        default=Type.Q8_0,
    )  # fmt: skip


@pytest.fixture
def repacked(monkeypatch):
    """The matrices of GGUF files that are repacked from now on."""
    from qlora_wgpu.gguf import folder

    names, original = [], folder.repack_ggml
    monkeypatch.setattr(
        folder, "repack_ggml", lambda *given: names.append(given[3]) or original(*given)
    )
    return names


@pytest.mark.slow
def test_layers_of_a_gguf_file_are_made_once(gguf_file, device, cache, repacked):
    """Repacked, and quantized anew; what is told of the latter is told by each run."""

    def told(offload=STREAMED, keep=True):
        layout = laid_out(gguf_file, device, keep=keep, offload=offload)
        with pytest.warns(UserWarning, match="2 linear layers are stored") as warnings:
            logits, _ = computed(layout, device)
        return logits, str(warnings[0].message), layout

    expected, sentence, _ = told(OffloadPlan(), keep=False)
    repacked.clear()
    first, *_ = told()
    assert len(repacked) == 7 * LAYERS - 2
    repacked.clear()
    for offload in (STREAMED, OffloadPlan()):
        again, also, layout = told(offload)
        np.testing.assert_array_equal(again, expected)
        assert also == sentence and not repacked
        assert offload != STREAMED or all(map(is_mapped, pieces(layout)))
    np.testing.assert_array_equal(first, expected)
    status = gguf_file.stat()
    os.utime(gguf_file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))  # another file
    told()
    assert repacked and len(list(cache.iterdir())) == 2


def test_models_that_were_used_long_ago_give_way(folder, device, cache, monkeypatch):
    monkeypatch.setattr("qlora_wgpu.model.weight_cache._KEPT", 2)
    for age in (3, 2, 1):
        (cache / str(age)).mkdir(parents=True)
        os.utime(cache / str(age), (age, 10 - age))
    loaded(laid_out(folder, device), device)
    assert {"1"} < {path.name for path in cache.iterdir()} and len(list(cache.iterdir())) == 2


def test_a_layer_is_one_image_of_all_its_storages():
    """Those that stay on the device share larger ones, up to a size."""
    layer = FlatLayer(3, None)
    first, second, large = (layer.storage(name, size, 700) for name, size in
                            (("a", 300), ("b", 100), ("c", 800)))  # fmt: skip
    assert layer.table == [(0, "a", 300), (512, "b", 100), (768, "c", 800)]
    assert layer.nbytes == 512 + 256 + 1024 and layer.begins[large] == 768
    assert first.whole is second.whole is not large.whole and large.whole is large
    assert layer.storage("d", 600, 700).whole is not first.whole
    filled, image = {}, np.arange(2560 // 4, dtype=np.uint32).view(np.uint8)
    layer.fill(image, lambda storage, data: filled.update({storage: data}))
    assert [len(filled[each]) for each in (first, second, large)] == [300, 100, 800]
    assert filled[second].view(np.uint32)[0] == 128
    assert layer.host_bytes == 0 and layer.device_bytes >= layer.nbytes - 256


def test_a_streamed_layer_is_in_host_memory():
    group = WeightStream().new_group("g")
    layer = FlatLayer(3, group, copied=5)
    storage, image = layer.storage("a", 300), np.zeros(512, np.uint8)
    assert storage.group is group and layer.device_bytes == 0
    assert layer.host_bytes == 5
    layer.as_stored = False
    assert layer.host_bytes == layer.nbytes == 512
    layer.fill(image, None)
    assert group.chunks == {0: image}

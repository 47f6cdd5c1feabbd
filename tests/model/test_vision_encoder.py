"""Vision towers against recorded PyTorch, several images at once."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from references.seeded import norm_offset, weights
from references.vision_cases import CASES, TILED, crops
from safetensors.numpy import save_file

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CheckpointError, ShapeError, UnsupportedModelError
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.images.pixels import ProcessedImage, Tiles
from qlora_wgpu.model.vision_encoder import TowerPlan, VisionEncoder, read_tower
from qlora_wgpu.quant import quantize_nf4

RECORDED = np.load(Path(__file__).parents[1] / "references/vision.npz")


def config_of(case, **changes):
    return {**json.loads(str(RECORDED[f"{case}/config"])), **changes}


def saved(case, folder, rename=lambda name: name):
    """The folder of a model that has nothing but its tower's weights."""
    config = config_of(case)
    tensors = weights(json.loads(str(RECORDED[f"{case}/shapes"])), norm_offset(CASES[case][0]))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {rename(name): array for name, array in tensors.items()}, folder / "model.safetensors"
    )
    return ModelFolder.open(folder), config


def images_of(case):
    tiled = [Tiles(*tiles, size=size) for size, tiles in TILED]
    layouts = tiled if case == "llava_next" else [Tiles()] * len(crops(case))
    return [
        ProcessedImage(tuple(own), layout) for own, layout in zip(crops(case), layouts, strict=True)
    ]


def distances(case, found):
    """The errors of each image's features, relative to the largest."""
    expected = [RECORDED[f"{case}/{i}"] for i in range(len(found))]
    assert [f.rows.shape for f in found] == [e.shape for e in expected]
    return [
        np.abs(f.rows - e).max() / np.abs(e).max() for f, e in zip(found, expected, strict=True)
    ]


@pytest.mark.quick(case=["qwen2_5_vl"])
@pytest.mark.cover(case=["idefics3", "llava_next", "gemma3", "qwen2_5_vl", "qwen3_vl", "lfm2_vl"])
@pytest.mark.parametrize("case", CASES)
def test_features_are_pytorchs(device, tmp_path, case):
    folder, config = saved(case, tmp_path)
    with VisionEncoder(folder, config, device, "float32") as encoder:
        found = encoder.encode(images_of(case))
    assert max(distances(case, found)) <= 1e-5  # float32 sums in another order
    merge = config["vision_config"].get("spatial_merge_size")
    for image, own in zip(found, crops(case), strict=True):
        side = merge and merge * config["vision_config"]["patch_size"]
        is_qwen = CASES[case][0].startswith("qwen")
        assert image.grid == (tuple(n // side for n in own[0].shape[1:]) if is_qwen else None)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_features_of_bfloat16_operands(device, tmp_path, case):
    folder, config = saved(case, tmp_path)
    with VisionEncoder(folder, config, device) as encoder:
        found = encoder.encode(images_of(case))
    assert max(distances(case, found)) <= 2e-2  # each of some ten products rounds by 2⁻⁹


def test_images_do_not_depend_on_what_they_are_encoded_with(device, tmp_path):
    folder, config = saved("qwen3_vl", tmp_path)
    images = images_of("qwen3_vl")
    with VisionEncoder(folder, config, device, "float32") as encoder:
        together = encoder.encode([images[1], images[0], images[1]])
        alone = encoder.encode(images[1:])
    assert np.array_equal(together[0].rows, together[2].rows)
    assert np.abs(together[0].rows - alone[0].rows).max() <= 1e-5 * np.abs(alone[0].rows).max()


def test_more_images_than_fit_at_once(device, tmp_path):
    folder, config = saved("idefics3", tmp_path)
    with VisionEncoder(folder, config, device, "float32", most_patches=40) as encoder:
        found = encoder.encode(images_of("idefics3"))
    assert max(distances("idefics3", found)) <= 1e-5


def test_memory_is_as_planned_and_freed_by_closing(settled_device, tmp_path):
    folder, config = saved("qwen3_vl", tmp_path)
    memory = settled_device.memory
    before = memory.total
    encoder = VisionEncoder(folder, config, settled_device, "float32")
    encoder.encode(images_of("qwen3_vl"))
    planned = encoder.plan.memory([encoder.plan.capacity(6 * 10 + 2 * 14)])  # of both images
    assert memory.total - before == planned.total()
    encoder.close()
    assert memory.total == before


@pytest.mark.slow
def test_clamped_values_are_reported_once(device, tmp_path):
    folder, config = saved("llava", tmp_path)
    with VisionEncoder(folder, config, device) as encoder:
        counts = Storage("saturated", "base", 16, np.array([1234, 0, 0, 0], np.uint32))
        allocate(device, counts)
        encoder.plan.saturated = vector("saturated", 4, "uint32", counts)
        with pytest.warns(match="1,234 values of the vision tower exceed the maximum of matrix un"):
            encoder.encode(images_of("llava"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encoder.encode(images_of("llava"))


@pytest.mark.quick(profile=[CPU_PROFILE])
@pytest.mark.parametrize("profile", [CPU_PROFILE, GPU_PROFILE], ids=["buffers", "as on GPUs"])
def test_features_by_other_kernels(device, tmp_path, profile, monkeypatch):
    monkeypatch.setattr(device, "profile", profile)
    for case in ("qwen2_5_vl", "gemma3", "gemma4"):
        own = tmp_path / case
        own.mkdir()
        folder, config = saved(case, own)
        with VisionEncoder(folder, config, device, "float32") as encoder:
            assert max(distances(case, encoder.encode(images_of(case)))) <= 1e-5


def older(name):
    """LLaVA's names before transformers 5."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def test_older_names_in_files(device, tmp_path):
    folder, config = saved("llava", tmp_path, older)
    with VisionEncoder(folder, config, device, "float32") as encoder:
        assert max(distances("llava", encoder.encode(images_of("llava")))) <= 1e-5


def in_four_bits(tensors):
    """bitsandbytes' NF4 of all matrices in layers, and what they dequantize to."""
    stored, dequantized = {}, {}
    for name, array in tensors.items():
        stored[name] = dequantized[name] = array
        if ".layers." in name and array.ndim == 2:
            made = quantize_nf4(array, 32, False, dtype="float32")
            state = {
                "quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": array.shape,
            }  # fmt: skip
            raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
            stored |= {
                name: made.codes[:, None], f"{name}.absmax": made.absmax,
                f"{name}.quant_map": made.format.quant_map,
                f"{name}.quant_state.bitsandbytes__nf4": raw,
            }  # fmt: skip
            dequantized[name] = made.dequantize()
    return stored, dequantized


def test_a_quantized_tower_is_dequantized(device, tmp_path):
    found = []
    tensors = weights(json.loads(str(RECORDED["llava/shapes"])), 0.0)
    for number, arrays in enumerate(in_four_bits(tensors)):
        own = tmp_path / str(number)
        own.mkdir()
        (own / "config.json").write_text(json.dumps(config_of("llava")))
        save_file(arrays, own / "model.safetensors")
        folder = ModelFolder.open(own)
        with VisionEncoder(folder, config_of("llava"), device, "float32") as encoder:
            found.append(encoder.encode(images_of("llava"))[0].rows)
    assert np.array_equal(*found)
    assert np.abs(found[0] - RECORDED["llava/0"]).max() > 0.01  # it was quantized


def test_the_plan_tells_the_memory_before_weights_are_read(device, tmp_path):
    config = config_of("qwen2_5_vl")
    plan = TowerPlan(config, "bfloat16", profile=CPU_PROFILE, max_binding=1 << 27)
    few, many = (plan.memory([plan.capacity(patches)]) for patches in (100, 1000))
    matrices = sum(2 * spec.out_features * spec.in_features for spec in plan.matrices.values())
    assert few["base"] >= matrices and few["activations"] > 0
    assert many["base"] == few["base"]
    assert many["activations"] > 5 * few["activations"]


def test_capacities_are_few_and_at_most_half_too_large():
    plan = TowerPlan(config_of("idefics3"), "bfloat16", profile=CPU_PROFILE, max_binding=1 << 27)
    sizes = [plan.capacity(n) for n in range(1, 5000)]
    assert all(n <= size for n, size in zip(range(1, 5000), sizes, strict=True))
    assert all(size <= max(1.5 * n, 4 * 144) for n, size in zip(range(1, 5000), sizes, strict=True))
    assert len(set(sizes)) < 16 and all(size % 9 == 0 for size in sizes)


def test_the_hash_is_of_weights_and_config(device, tmp_path):
    hashes = set()
    for i, (case, change) in enumerate((("llava", 0), ("llava", 1), ("llava-layers", 0))):
        own = tmp_path / str(i)
        own.mkdir()
        folder, config = saved(case, own)
        if change:
            config = {**config, "vision_feature_select_strategy": "full"}
        with VisionEncoder(folder, config, device) as encoder:
            hashes.add(encoder.hash)
    assert len(hashes) == 3


def test_a_model_without_images_is_refused():
    with pytest.raises(UnsupportedModelError, match="images are not supported for model_type 'ol"):
        read_tower({"model_type": "olmo"})


@pytest.mark.parametrize(
    ("case", "where", "changes", "told"),
    [
        ("llava", None, {"vision_feature_layer": 9}, "vision_feature_layer must be from -4 to 3"),
        ("llava", None, {"vision_feature_select_strategy": "mean"}, "'mean' is not supported"),
        ("llava", "vision_config", {"hidden_act": "tanh"}, "hidden_act = 'tanh'"),
        ("llava", "vision_config", {"image_size": [30, 30]}, "image_size must be a positive int"),
        ("llava", "vision_config", {"model_type": "vit"}, "model_type = 'vit' is not supported"),
        ("llava", None, {"vision_config": None}, "images require a vision_config, got None"),
        ("llava_next", None, {"vision_feature_select_strategy": "full"}, "'full' is not supported"),
        ("qwen2_vl", "vision_config", {"depth": 10**9}, "depth must be at most"),
        ("idefics3", "vision_config", {"num_channels": 4}, "num_channels = 4 is not supported"),
        ("qwen2_vl", "vision_config", {"num_heads": 5}, "5 heads of a hidden_size of 24"),
        ("gemma3", None, {"mm_tokens_per_image": 9}, "mm_tokens_per_image must be the square"),
        ("qwen2_5_vl", "vision_config", {"window_size": 5}, "window_size must be at least"),
        ("qwen2_5_vl", "vision_config", {"fullatt_block_indexes": 1}, "fullatt_block_indexes mus"),
        ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [3]}, "integers from 0 to 2"),
        (
            "qwen3_vl", "vision_config", {"rope_parameters": {"rope_type": "yarn"}},
            "rope_type = 'yarn' is not supported",
        ),
    ],
)  # fmt: skip
def test_what_no_tower_has_is_refused_by_name(case, where, changes, told):
    config = config_of(case)
    config = {**config, **changes} if where is None else {
        **config, where: {**config[where], **changes}
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=told):
        read_tower(config)


def test_images_of_other_sizes_are_refused(device, tmp_path):
    folder, config = saved("llava", tmp_path)
    with VisionEncoder(folder, config, device) as encoder:
        small = ProcessedImage((np.zeros((3, 25, 30), np.float32),), Tiles())
        with pytest.raises(UnsupportedModelError, match="for 6 x 6 patches, but the image proces"):
            encoder.encode([small])
    tower = read_tower(config_of("mistral3"))
    with pytest.raises(ShapeError, match="multiples of 10 pixels, got 30 x 25: check prepro"):
        tower.arrange(small.crops[0], {})


def test_a_tensor_that_is_missing_is_named(device, tmp_path):
    folder, config = saved("llava", tmp_path, lambda name: name.replace("linear_2", "linear_3"))
    with pytest.raises(CheckpointError, match="linear_2"):
        VisionEncoder(folder, config, device)

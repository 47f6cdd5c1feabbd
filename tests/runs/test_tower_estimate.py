"""What ``estimate`` plans for a vision tower, and what generation leaves for one."""

import json
import re
from pathlib import Path

import pytest
from references.image_run_cases import written
from support.commands import run_here

from qlora_wgpu import LoraConfig, QuantConfig, estimate
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.gpu.memory import room_of
from qlora_wgpu.limits import GIB, MIB
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.runs import estimation
from qlora_wgpu.runs.placement import fit, of_other_lengths
from qlora_wgpu.runs.workload import DeviceSpec, GenerationWorkload
from qlora_wgpu.training import Observer

DOCS = Path(__file__).parents[2] / "docs/images.md"
SIZES = {"hidden_size": 1152, "intermediate_size": 4304}
PUBLISHED = {
    "Qwen/Qwen3-VL-8B-Instruct": {
        "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151_936, "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20],
                             "mrope_interleaved": True},
        },
        "vision_config": {**SIZES, "depth": 27, "out_hidden_size": 4096},
    },
    "google/gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
                        "sliding_window": 1024, "rope_scaling": {"factor": 8.0,
                                                                 "rope_type": "linear"}},
        "vision_config": {**SIZES, "num_hidden_layers": 27, "num_attention_heads": 16,
                          "image_size": 896, "patch_size": 14},
    },
}  # fmt: skip
TINY = {
    "model_type": "gemma3", "mm_tokens_per_image": 4,
    "text_config": {
        "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 331,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    },
    "vision_config": {
        "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    },
}  # fmt: skip


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(estimation, "_target", lambda settings: DeviceSpec())


def stored(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_documented_memory(tmp_path, monkeypatch, name):
    on_a_gpu(monkeypatch)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{name}`")]
    assert rows
    for row in rows:
        seq, tokens, tower, training = (
            int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+)(?= )", row)
        )
        path = stored(tmp_path, PUBLISHED[name])
        made = estimate(path, seq=seq, image=(1024, 1024))
        assert made.tower.tokens == tokens
        assert [round(n / MIB) for n in (made.tower.total, made.total)] == [tower, training]
        assert made.tower.total <= room_of(8 * GIB)


def test_without_a_processor_images_keep_their_size_or_have_the_towers(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    path = stored(tmp_path, TINY)
    small, large = (estimate(path, seq=32, image=size).tower for size in ((9, 5), (3000, 1000)))
    assert small == large and (small.images, small.tokens) == (1, 4)
    assert small.feature_bytes == 4 * 4 * 32 and not small.how
    qwen = PUBLISHED["Qwen/Qwen3-VL-8B-Instruct"]
    text = {**qwen["text_config"], "num_hidden_layers": 1}
    path = stored(tmp_path, {**qwen, "text_config": text, "vision_config": {
        **qwen["vision_config"], "depth": 1, "deepstack_visual_indexes": [0],
    }})  # fmt: skip
    assert estimate(path, seq=32, image=(640, 320)).tower.tokens == 20 * 10


def test_a_processor_says_how_an_image_is_resized(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    _, ids = written("gemma3", tmp_path)
    config = {**TINY, "mm_tokens_per_image": 16, **ids}
    config["vision_config"] = {**TINY["vision_config"], "image_size": 112}
    stored(tmp_path, config)
    found = estimate(tmp_path, seq=32, image=(300, 200)).tower
    assert found.tokens == 16


@pytest.mark.slow
def test_a_budget_streams_the_tower_or_says_what_it_needs(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    deep = {**TINY["vision_config"], "num_hidden_layers": 8}
    path = stored(tmp_path, {**TINY, "vision_config": deep})
    whole = estimate(path, seq=32, image=(9, 9)).tower
    streamed = estimate(path, seq=32, image=(9, 9), budget=whole.total - 1).tower
    assert streamed.total < whole.total and streamed.host_bytes > 0
    assert "layers take turns on the device" in streamed.how
    none = estimate(path, seq=32, image=(9, 9), budget=1000).tower
    assert "the vision tower needs" in none.problem and none.memory == whole.memory


def test_an_image_for_a_model_without_is_refused(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    text = {**TINY["text_config"], "model_type": "llama"}
    with pytest.raises(ConfigError, match="model_type 'llama' reads no images: leave out"):
        estimate(stored(tmp_path, text), image=(9, 9))
    with pytest.raises(ConfigError, match="image must be a width and a height in pixels, got 0"):
        estimate(stored(tmp_path, TINY), image=(0, 9))


def test_the_command_prints_and_writes_the_tower(tmp_path, monkeypatch):
    on_a_gpu(monkeypatch)
    stored(tmp_path, TINY)
    done = run_here(
        "estimate", "config.json", "--seq", "4", "--image", "64x32", "--json", "e.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert "planned device memory of the vision tower" in done.stdout
    assert "1 image of 4 tokens: 0.0 MiB of features are kept" in done.stdout
    assert "an image of 4 tokens does not fit into a row of 4: raise --seq" in done.stdout
    assert json.loads((tmp_path / "e.json").read_text())["tower"]["tokens"] == 4
    done = run_here("estimate", "config.json", "--image", "64", cwd=tmp_path)
    assert "--image must be a width and a height such as 1024x768, got '64'" in done.stderr


@pytest.mark.slow
def test_generation_leaves_room_for_a_tower(settled_device, monkeypatch):
    """Resident, then streamed; with less, a tower is placed or refused at the first image."""
    base = Pretrained.from_config({**TINY, "image_token_index": 330})
    texts = GenerationWorkload.of(base, 8, 8, images=True)
    profile, most = settled_device.profile, settled_device.max_binding
    layout = ModelPlan(
        base, LoraConfig(r=2), QuantConfig(), "bfloat16", profile=profile, max_binding=most
    )
    plans = texts.plans(layout)
    needed = {
        tower: GenerationWorkload(8, 16, images=True, tower=tower).memory(layout, plans)
        for tower in ("resident", "streamed", "")
    }
    assert needed["resident"]["vision tower"] > needed["streamed"]["vision tower"] > 0
    assert needed[""]["vision tower"] == 0
    for tower, memory in needed.items():
        monkeypatch.setattr(settled_device, "budget", memory.total() + of_other_lengths(memory))
        placed = fit(texts, layout, settled_device, Observer())
        assert placed.workload.tower == tower
        assert placed.memory.total() <= settled_device.budget

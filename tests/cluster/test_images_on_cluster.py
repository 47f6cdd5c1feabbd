"""Rows with images on a cluster: the losses, samples and adapter of one device."""

import json

import pytest
from e2e.test_image_runs import TEXT, Tower, row
from PIL import Image
from references.seeded import weights
from safetensors.numpy import save_file
from support.image_models import folder_of, rgb_of
from support.workers_here import WorkersHere

from qlora_wgpu.families.family import find_family
from qlora_wgpu.model.image_inputs import ImageFeatures
from qlora_wgpu.model.pretrained import tensor_shapes
from qlora_wgpu.runs import train
from qlora_wgpu.runs.cluster import Worker
from qlora_wgpu.selfcheck import results
from qlora_wgpu.training import images

FILES = ("adapter/adapter_model.safetensors", "checkpoints/step-1/optimizer.safetensors")


def write_run(folder):
    """A model and rows, some with images."""
    (folder / "model").mkdir()
    folder_of("llava", folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text()) | {"text_config": TEXT}
    path.write_text(json.dumps(config))
    shapes = tensor_shapes(find_family(config).read(config))
    save_file(weights(shapes, 0.0), folder / "model" / "model.safetensors")
    for number, size in enumerate(((9, 5), (60, 40))):
        Image.fromarray(rgb_of(*size)).save(folder / f"{number}.png")
    first, second = str(folder / "0.png"), str(folder / "1.png")
    rows = [row(0, [first]), row(1, [second, first]), row(2, []), row(3, [second])]
    answers = {"chosen": "So.", "rejected": "Not so."}
    pairs = [{"prompt": each["messages"][:1], "images": each["images"], **answers} for each in rows]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def settings_of(place, name, workers, objective):
    rows = str(place / ("sft.jsonl" if objective == "sft" else "pairs.jsonl"))
    given = {
        "model": {"path": str(place / "model")},
        "lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
        "quant": {"scheme": "none"},
        "data": {
            "train": rows, "eval": rows, "max_seq_length": 128, "image_cache": "memory",
            "cache": False,
        },
        "train": {
            "objective": objective, "max_steps": 1, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4, "compute_dtype": "float32",
        },
        "optim": {"learning_rate": 1e-2, "warmup_ratio": 0.0},
        "eval": {"eval_steps": 1, "sample_max_new_tokens": 4},
        "output": {"dir": str(place / name), "save_steps": 1},
    }  # fmt: skip
    if workers:
        given["cluster"] = {"scheduler": "local", "workers": workers}
    return given


def traces(place, name):
    """All that a run leaves and that must be the same bits."""
    rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    for each in rows:
        for key in ("tokens_per_second", "workers"):
            each.pop(key, None)
    samples = (place / name / "samples.jsonl").read_text()
    return rows, samples, [(place / name / file).read_bytes() for file in FILES]


@pytest.mark.slow
@pytest.mark.cover(objective=["sft"])
@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_a_run_has_the_bits_of_one_device(device, tmp_path, monkeypatch, objective):
    monkeypatch.setattr(images, "opened_tower", Tower)
    monkeypatch.setattr(results, "check_launches", lambda *given: [])
    monkeypatch.setattr("qlora_wgpu.runs.training.open_device", lambda *given: device)
    monkeypatch.setattr("qlora_wgpu.runs.cluster.device_of", lambda settings: device)
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Cluster", WorkersHere)
    monkeypatch.setattr("qlora_wgpu.cluster.owner._BYTES", 1)  # an evaluation takes several turns
    seen = []

    class Seeing(Worker):
        def gradient(self, request, batch, divergence):
            seen.append(batch.images.features.nbytes)
            return super().gradient(request, batch, divergence)

        def text(self, request, ids, more, stop_ids, longest, *images):
            seen.extend(type(each) for each in images)
            return super().text(request, ids, more, stop_ids, longest, *images)

    monkeypatch.setattr("qlora_wgpu.runs.cluster.Worker", Seeing)
    write_run(tmp_path)
    for count in (0, 2):
        train(settings_of(tmp_path, f"run-{count}", count, objective))
    alone, shared = (traces(tmp_path, f"run-{count}") for count in (0, 2))
    assert shared == alone
    assert ImageFeatures in seen and any(isinstance(each, int) and each > 0 for each in seen)

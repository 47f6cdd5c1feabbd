"""Rows with weights: a row of weight two is a row that stands there twice."""

import json

import pytest
from support.observing import observed

from e2e.tiny import write_model
from qlora_wgpu import train
from qlora_wgpu.training import Observer

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {max_seq_length: 32, packing: PACKING, columns: COLUMNS, train: NAME.jsonl}
train: {max_steps: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 4,
        compute_dtype: float32}
optim: {learning_rate: 1e-9, lr_scheduler_type: constant}
device: {tune: never}
"""
ROWS = [("one and two", 2), ("a", 1), ("three, four, five", 3), ("what is six?", 0.5)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    write_model(folder / "model")
    repeated = [text for text, weight in ROWS for _ in range(int(2 * weight))]
    for name, rows in (
        ("weighted", [{"text": text, "w": weight} for text, weight in ROWS]),
        ("repeated", [{"text": text} for text in repeated]),
    ):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module", params=(-98, 48))
def scaled(request, place):
    """The weighted rows, all weights times a power of two at an end of what weights may be."""
    name = f"scaled{request.param}"
    rows = [{"text": text, "w": weight * 2.0**request.param} for text, weight in ROWS]
    (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


class Planned(Observer):
    def planned(self, memory):
        self.bytes = sum(memory.values())


def run(place, name, packing, columns="{}", observer=None):
    path = place / f"{name}-{packing}.yaml"
    text = CONFIG.replace("NAME", name).replace("PACKING", packing).replace("COLUMNS", columns)
    path.write_text(text)
    out = place / f"{name}-{packing}-{'w' in columns}"
    changes = [f"output.dir={out}", "train.gradient_accumulation_steps=8"]
    result = train(path, callbacks=observed(observer), overrides=changes, overwrite=True)
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    return result, (row["loss"], row["grad_norm"])


@pytest.mark.cover(packing=["true"])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_weight_is_a_number_of_rows(place, packing):
    observer = Planned()
    result, weighted = run(place, "weighted", packing, "{weight: w}", observer)
    without = Planned()
    _, repeated = run(place, "repeated", packing)
    unweighted, plain = run(place, "weighted", packing, observer=without)
    # The few bytes that no plan counts are those of any run.
    assert result.peak_bytes - observer.bytes == unweighted.peak_bytes - without.bytes < 100
    assert observer.bytes > without.bytes
    # Sums of other micro-batches, in float32.
    assert weighted == pytest.approx(repeated, rel=2e-6)
    assert weighted != pytest.approx(plain, rel=1e-3)


@pytest.mark.cover(packing=["true"])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_weights_count_beside_each_other_alone(place, scaled, packing):
    """However small or large all are: squares of their gradient would be 0 or infinite."""
    _, weighted = run(place, "weighted", packing, "{weight: w}")
    _, found = run(place, scaled, packing, "{weight: w}")
    assert found == weighted and weighted[1] > 0

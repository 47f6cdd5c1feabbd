"""Small models that PyTorch and PEFT have computed, and what they recorded of them."""

import json

import numpy as np
from references.seeded import adapter, weights
from safetensors.numpy import save_file

from qlora_wgpu import Config, Trainer

MOST_APART = 2e-5  # relative: measured 1e-5; float32 PyTorch itself differs by 1.5e-5


def difference(ours, theirs):
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def recorded_base(file, place):
    """The base's folder, and what was computed."""
    recorded = np.load(file)
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(str(recorded["config"]))
    shapes = json.loads(str(recorded["shapes"]))
    save_file(weights(shapes, float(recorded["norm_offset"])), folder / "model.safetensors")
    return folder, recorded


def expected_gradients(recorded):
    return {n[5:]: recorded[n] for n in recorded.files if n.startswith("grad:")}


def start(recorded):
    """The adapter that everything was computed with."""
    return adapter({n: array.shape for n, array in expected_gradients(recorded).items()})


def check_logits(logits, recorded, mask, allowed=1e-5):
    """Those that were recorded, and each token's normalizer: float32 sums in another order."""
    seen = mask == 1
    most = allowed * np.abs(recorded["logits"][seen]).max()
    assert np.abs(logits[..., :40] - recorded["logits"])[seen].max() <= most
    if "last" in recorded.files:
        assert np.abs(logits[..., -1] - recorded["last"])[seen].max() <= most


def check_normalizers(logits, recorded, mask):
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(lse - recorded["lse"])[mask == 1].max() <= 1e-4


def check_gradients(model, recorded, ids, mask, labels):
    expected = expected_gradients(recorded)
    loss, gradients = model.loss_and_grads(ids, labels, mask)
    assert abs(loss - recorded["losses"][0]) <= 1e-5
    assert set(gradients) == set(expected)
    apart = {name: difference(gradients[name], array) for name, array in expected.items()}
    assert max(apart.values()) <= MOST_APART, apart


def check_training(model, folder, recorded, ids, mask, labels, out, steps=None):
    """Trains as was recorded, and compares each step's loss; only the first steps if given."""
    exact, float32 = (recorded[name][:steps] for name in ("losses", "losses_float32"))
    rows = [
        {"input_ids": i, "labels": t, "attention_mask": m}
        for i, t, m in zip(ids, labels, mask, strict=True)
    ]
    config = Config(
        model={"path": str(folder)},
        data={"max_seq_length": ids.shape[1]},
        train={
            "max_steps": len(exact),
            "per_device_train_batch_size": len(ids),
            "gradient_accumulation_steps": 1,
        },
        optim={"learning_rate": 5e-3, "lr_scheduler_type": "constant", "weight_decay": 0.01},
        output={"dir": str(out), "save_steps": 1000},
    )
    Trainer(model, config).train(rows)
    logged = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    losses = np.array([row["loss"] for row in logged])
    # AdamW starts by the sign of each gradient, those near zero too, so rounding grows: PyTorch's
    # own float32 shows how much.
    apart = np.abs(losses / exact - 1)
    bound = 2e-5 + 4 * np.abs(float32 / exact - 1).max()
    assert bound <= 1e-3 and apart.max() <= bound, apart

"""Objectives over answers about images, against PyTorch's recorded losses and gradients."""

from pathlib import Path

import numpy as np
import pytest
from references.image_cases import ANSWERED, BETA, pairs

from e2e.test_image_language import check_gradients, images_of, opened
from e2e.test_image_language import recorded as recorded_model
from qlora_wgpu.data import Dataset, Example
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_LOSS, STATS_TOKENS
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.training.executor import LocalExecutor, MicroBatch
from qlora_wgpu.training.images import BatchImages
from qlora_wgpu.training.preferences import KLPairs, PreferenceData, in_blocks
from qlora_wgpu.training.references import ReferenceModel

RECORDED = np.load(Path(__file__).parents[1] / "references/image_answers.npz")


def answers():
    """The recorded pairs as examples, with their rows' numbers and places as keys of images."""
    rows, ids, mask, labels = pairs()
    made = []
    for row, *arrays in zip(rows, ids, labels, mask, strict=True):
        own, targets = (array[: arrays[2].sum()].astype(np.int32) for array in arrays[:2])
        keys = ((), ("1/0",), ("2/0", "2/1", "2/2"))[row]
        made.append(Example(own, targets, images=keys))
    return Dataset(made)


def keyed(images):
    return {f"{row}/{at}": each for row, own in enumerate(images) for at, each in enumerate(own)}


@pytest.mark.parametrize("rows", [4, 2])
@pytest.mark.parametrize("objective", ["dpo", "orpo"])
@pytest.mark.parametrize("case", ANSWERED)
def test_against_pytorch(device, tmp_path, case, objective, rows):
    """Also in two micro-batches."""
    known = recorded_model(case)
    model, data = opened(case, known, tmp_path, device), answers()
    images = BatchImages(keyed(images_of(known)), model.architecture)
    loss_type = {"dpo": "sigmoid", "orpo": "orpo"}[objective]
    preference = Preference(objective, loss_type, BETA)
    model.options = TrainingOptions(objective=Objective(preference=preference))
    executor = LocalExecutor(model, images=True)
    with model.adapter_off():
        reference = ReferenceModel(model, executor, data, preference, rows, 64, images)
        logps = reference.logps(keep=False, progress=lambda text: None)
    if objective == "dpo":
        assert logps.own == pytest.approx(RECORDED[f"{case}/reference"], rel=1e-6)
    made = PreferenceData(data, preference, logps, 64, images)
    blocks = in_blocks(data, preference, rows)
    model.zero_gradient()
    batches = [MicroBatch.of_answers(model, each) for each in made.batches(blocks, rows)]
    executor.accumulate(batches, lambda: False)
    stats = model.read_stats()
    count = float(stats[STATS_TOKENS])
    gradients = model.adapter.split(model.read_flat(model.adapter.gradient) / np.float32(count))
    prefix = f"{case}/{objective}/"
    theirs = {key: RECORDED[prefix + key] for key in ("loss", "names", "norms", "gradients")}
    check_gradients(theirs, float(stats[STATS_LOSS]) / count, gradients)


@pytest.mark.quick
def test_divergence_pairs_have_the_images_of_their_prompts():
    """Equal prompts with other images are other prompts."""
    labels = np.array([IGNORE_INDEX] * 3 + [7, 8])
    ids = np.array([1, 330, 3, 7, 8])
    others = np.array([1, 330, 3, 5, 6]), np.array([IGNORE_INDEX] * 3 + [5, 6])
    pairs_of = KLPairs(
        Dataset(
            [
                Example(ids, labels, images=("a",)),
                Example(*others, images=("a",)),
                Example(*others, images=("b",)),
            ]
        ),
        16,
    )
    assert [(each.input_ids[3:].tolist(), each.images) for each in pairs_of] == [
        ([5, 6], ("a",)), ([5, 6], ("a",)), ([5, 6], ("b",)),
    ]  # fmt: skip

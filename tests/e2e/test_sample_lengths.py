"""Rotations by a sample's length: its own, whatever else is in its row, its batch or its cache."""

from pathlib import Path

import numpy as np
import pytest
from references.seeded import samples
from support.grown_texts import grown
from support.recorded_models import difference

from e2e.test_generation import opened
from qlora_wgpu.generation import generate
from qlora_wgpu.generation.sampling import Sampling

FOLDER = Path(__file__).parents[1] / "references"
CASES = ["llama-dynamic", "phi3-longrope"]  # both change past 16 tokens


@pytest.fixture(scope="module", params=CASES)
def case(request, device, tmp_path_factory):
    model = opened(request.param, tmp_path_factory.mktemp("model"), device)
    return model, np.load(FOLDER / f"{request.param}.npz")


def packed(parts, length, fill=0):
    row = np.full((1, length), fill)
    row[0, : sum(map(len, parts))] = np.concatenate(parts)
    return row


def numbers(parts):
    return [np.full(len(part), i + 1) for i, part in enumerate(parts)]


def recorded_gradients(recorded):
    prefix = "packed_grad:"
    return {n.removeprefix(prefix): recorded[n] for n in recorded.files if n.startswith(prefix)}


def assert_recorded(loss, gradients, recorded):
    assert abs(loss - recorded["packed_loss"]) <= 1e-5
    expected = recorded_gradients(recorded)
    assert set(gradients) == set(expected)
    for name, array in expected.items():
        assert difference(gradients[name], array) <= 2e-5, name


@pytest.mark.parametrize("padding", [0, 12])
def test_samples_in_one_row_are_as_alone(case, padding):
    model, recorded = case
    ids = samples()
    length = sum(map(len, ids)) + padding
    row, mask = packed(ids, length), packed(numbers(ids), length)
    labels = packed(ids, length, -100)
    assert_recorded(*model.loss_and_grads(row, labels, mask), recorded)
    logits = model.logits(row, mask)[0][: length - padding, :40]
    expected = recorded["packed_logits"]
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.quick
def test_rows_of_several_lengths_are_as_alone(case):
    model, recorded = case
    ids = samples()
    row, mask = np.zeros((2, len(ids), 32), np.int64)
    for i, sample in enumerate(ids):
        row[i, : len(sample)], mask[i, : len(sample)] = sample, 1
    labels = np.where(mask == 1, row, -100)
    assert_recorded(*model.loss_and_grads(row, labels, mask), recorded)
    total, count, _ = model.summed_loss([(row, labels, mask)])
    assert abs(total / count - recorded["packed_loss"]) <= 1e-5


def test_a_text_that_grows_is_as_if_read_anew(case):
    model, recorded = case
    text, expected = recorded["text"].tolist(), recorded["text_logits"]
    prompt, new = text[: -len(expected)], text[-len(expected) :]
    for capacity in (len(text), 64):
        ids, steps = grown(model, prompt, len(new), capacity, Sampling())
        # Some logits are recorded, so what is compared is how far they are from one of them.
        ours, theirs = steps[:, :40] - steps[:, :1], expected - expected[:, :1]
        apart = np.abs(ours - theirs).max()
        assert ids == new and apart <= 1e-5 * np.abs(expected).max(), (capacity, apart)
    assert list(generate(model, prompt, max_new_tokens=len(new))) == new

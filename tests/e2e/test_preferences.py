"""Losses, metrics and gradients of objectives over answers, against TRL's recorded ones.

``tests/references/record_preferences.py`` records them, of the very model of ``tiny.py``.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from references.record_preferences import (
    ALPHA,
    BETA,
    DPO,
    KTO,
    MODULES,
    RANK,
    adapter,
    pairs,
    singles,
)

from e2e.tiny import write_model
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import ShapeError
from qlora_wgpu.model.steps import PreferenceInputs, TrainingOptions
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import STATS_CORRECT, STATS_METRICS, STATS_TOKENS
from qlora_wgpu.ops.preference import METRICS, Preference, means

pytestmark = pytest.mark.quick

RECORDED = np.load(Path(__file__).parents[1] / "references" / "preferences.npz")
CLOSE = {"float32": 1e-4, "bfloat16": 0.05}  # of the norm; bfloat16's operands have 8 binary digits


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, device, tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"))
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES)
    made = QLoRAModel.from_pretrained(
        folder, lora, QuantConfig(scheme="none"), request.param, device
    )
    made.load_adapter(adapter({n: a.shape for n, a in made.adapter_state_dict().items()}))
    return made


def in_turns(arrays):
    """Pairs with chosen and rejected in turn, where TRL has all chosen in front."""
    return [array[[0, 3, 1, 4, 2, 5]] for array in arrays]


def checked(model, ids, mask, completion):
    return model.checked(ids, np.where(completion == 1, ids, -100), mask)


def references(model, *given):
    with model.adapter_off():
        return model.answer_logps(*given, len(given[0]))


def computed(model, preference, blocks, divergent=()):
    """Loss, metrics and flat gradient of micro-batches."""
    model.options = TrainingOptions(objective=Objective(preference=preference))
    model.zero_gradient()
    for *arrays, samples in divergent:
        model.measure("divergence", *arrays, samples)
    for *arrays, samples in blocks:
        model.accumulate(*arrays, samples=samples)
    stats = model.read_stats()
    sums = dict(zip(METRICS, stats[STATS_METRICS:].tolist(), strict=True))
    gradient = model.read_flat(model.adapter.gradient) / stats[1]
    model.zero_gradient()
    return stats[0] / stats[1], means(sums, preference), gradient


def compare(model, case, loss, metrics, gradient):
    close = CLOSE[model.compute_dtype]
    theirs = RECORDED[f"{case}/gradient"]
    parts = model.adapter.split(gradient)
    ours = np.concatenate([parts[name].ravel() for name in RECORDED["names"]])
    assert loss == pytest.approx(RECORDED[f"{case}/loss"], rel=close, abs=close)
    # The largest slopes of bfloat16 stand for a loss that is another by as much.
    assert np.linalg.norm(ours - theirs) <= (1 if close < 1e-3 else 3) * close * np.linalg.norm(
        theirs
    )
    recorded = json.loads(str(RECORDED[f"{case}/metrics"]))
    for name, value in metrics.items():
        assert value == pytest.approx(recorded[name], rel=close, abs=10 * close), name


def cut(block, samples, size):
    """A micro-batch as several of ``size`` rows."""
    for first in range(0, len(block[0]), size):
        part = slice(first, first + size)
        prompts = None if samples.prompts is None else samples.prompts[part]
        yield (
            *(array[part] for array in block),
            PreferenceInputs(samples.references[part], samples.numbers[part], prompts),
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", list(DPO))
def test_dpo(model, case):
    block = checked(model, *in_turns(pairs()))
    settings = {"beta": BETA, **DPO[case]}
    given = Preference("dpo", case.split("-")[0], **settings)
    samples = PreferenceInputs(references(model, *block), np.zeros(6, np.float32))
    compare(model, f"dpo/{case}", *computed(model, given, cut(block, samples, 6)))
    if case == "sigmoid":
        compare(model, f"dpo/{case}", *computed(model, given, cut(block, samples, 2)))


@pytest.mark.parametrize("beta", [0.1, 0.6])
def test_orpo(model, beta):
    ids, mask, completion = in_turns(pairs())
    learnt = completion.copy()
    learnt[::2] = mask[::2]
    block = checked(model, ids, mask, learnt)
    answer = checked(model, ids, mask, completion)[1]
    share = 3 / (block[1][::2] != -100).sum()
    numbers = np.where(np.arange(6) % 2, 0.0, share).astype(np.float32)
    samples = PreferenceInputs(
        np.zeros(6, np.float32), numbers, (block[1] != -100) & (answer == -100)
    )
    given = Preference("orpo", "orpo", beta)
    compare(model, f"orpo/{beta}", *computed(model, given, cut(block, samples, 6)))
    compare(model, f"orpo/{beta}", *computed(model, given, cut(block, samples, 2)))


@pytest.mark.parametrize("case", list(KTO))
def test_kto(model, case):
    own, other, labels = singles()
    block, others = checked(model, *own), checked(model, *other)
    settings = {"beta": BETA, **KTO[case]}
    given = Preference("kto", case.split("-")[0], **settings)
    samples = PreferenceInputs(references(model, *block), labels.astype(np.float32))
    divergent = PreferenceInputs(references(model, *others), np.zeros(4, np.float32))
    for size in (4, 1):
        before = cut(others, divergent, size) if given.has_divergence else ()
        compare(model, f"kto/{case}", *computed(model, given, cut(block, samples, size), before))


def test_dft(model):
    block = checked(model, *pairs())
    model.options = TrainingOptions(objective=Objective(confidence=True))
    model.zero_gradient()
    model.accumulate(*block)
    stats = model.read_stats()
    gradient = model.read_flat(model.adapter.gradient) / stats[1]
    model.zero_gradient()
    compare(model, "sft/dft", stats[0] / stats[1], {}, gradient)


HITS = [4, 2, 1, 1, 0, 1]  # of the answers in turns; tokens of them: 7, 9, 2, 6, 10, 1


@pytest.fixture(scope="module")
def predicted(model):
    """The pairs in turns; as many tokens of each answer are the likeliest, all others the least."""
    ids, mask, completion = (array.copy() for array in in_turns(pairs()))
    left = list(HITS)
    for at in range(1, ids.shape[1]):
        logits = model.logits(ids, mask)[:, at - 1]
        for row in np.flatnonzero(completion[:, at]):
            ids[row, at] = logits[row].argmax() if left[row] else logits[row].argmin()
            left[row] -= left[row] > 0
    assert not any(left)
    return ids, mask, completion


@pytest.mark.parametrize("size", [6, 2])
def test_hits_are_those_of_chosen_answers(model, predicted, size):
    block = checked(model, *predicted)
    samples = PreferenceInputs(references(model, *block), np.zeros(6, np.float32))
    given = Preference("dpo", "sigmoid", BETA)
    _, metrics, _ = computed(model, given, cut(block, samples, size))
    assert metrics["mean_token_accuracy"] == pytest.approx((4 + 1 + 0) / (7 + 2 + 10))


@pytest.mark.parametrize("confidence", [False, True])
def test_hits_of_rows_with_weights(model, predicted, confidence):
    """A hit counts what its row weighs, and not how likely it is."""
    weights = np.array([1, 0.5, 3, 1, 2, 8])
    model.options = TrainingOptions(objective=Objective(confidence=confidence))
    block = checked(model, *predicted)
    for given, each in ((None, np.ones(6)), (weights, weights)):
        spread = None if given is None else np.repeat(given[:, None], 16, 1)
        model.zero_stats()
        model.accumulate(*block, weights=spread)
        stats = model.read_stats()
        model.zero_gradient()
        model.zero_stats()
        share = (each * HITS).sum() / (each * predicted[2].sum(1)).sum()
        assert stats[STATS_CORRECT] / stats[STATS_TOKENS] == pytest.approx(share)


def test_packed_pairs(model):
    """Both answers of a pair in one row, and another pair behind them, have the same loss."""
    ids, mask, completion = in_turns(pairs())
    block = checked(model, ids, mask, completion)
    samples = PreferenceInputs(references(model, *block), np.zeros(6, np.float32))
    rows = np.zeros((3, 3, 32), np.int64)
    for at in range(4):
        length, (row, half) = mask[at].sum(), divmod(at, 2)
        first = mask[2 * row].sum() if half else 0
        rows[:, row, first : first + length] = [
            ids[at, :length], mask[at, :length] * (half + 1), completion[at, :length]
        ]  # fmt: skip
    rows[:, 2, :16], rows[:, 2, 16:] = (
        [ids[4], mask[4], completion[4]], [ids[5], 2 * mask[5], completion[5]]
    )  # fmt: skip
    packed = checked(model, *rows)
    given = Preference("dpo", "sigmoid", BETA)
    np.testing.assert_allclose(
        model.answer_logps(*packed, 6), model.answer_logps(*block, 6), rtol=0.02
    )
    compare(model, "dpo/sigmoid", *computed(model, given, cut(packed, samples, 6)))


def test_without_samples(model):
    model.options = TrainingOptions(objective=Objective(preference=Preference("dpo", "sigmoid")))
    with pytest.raises(ShapeError, match="requires samples of the type PreferenceInputs"):
        model.accumulate(*checked(model, *pairs()))


@pytest.mark.slow
def test_the_gradient_with_dropout(device, tmp_path):
    """The slope of the loss under one mask, along the gradient."""
    folder = write_model(tmp_path)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, lora_dropout=0.3)
    model = QLoRAModel.from_pretrained(folder, lora, QuantConfig(scheme="none"), "float32", device)
    model.load_adapter(adapter({n: a.shape for n, a in model.adapter_state_dict().items()}))
    block = checked(model, *in_turns(pairs()))
    samples = PreferenceInputs(references(model, *block), np.zeros(6, np.float32))
    preference = Preference("dpo", "sigmoid", beta=BETA)
    model.options = TrainingOptions(objective=Objective(preference=preference))
    start = model.read_flat(model.adapter.parameters).copy()

    def loss(parameters, key=5):
        model.write_parameters(parameters)
        model.zero_gradient()
        model.accumulate(*block, dropout_key=key, samples=samples)
        stats = model.read_stats()
        model.zero_stats()
        return float(stats[0] / stats[1]), model.read_flat(model.adapter.gradient) / stats[1]

    value, gradient = loss(start)
    assert value != loss(start, 6)[0] != loss(start, None)[0]
    norm = float(np.linalg.norm(gradient))
    along = 1e-2 * gradient / norm
    slope = (loss(start + along)[0] - loss(start - along)[0]) / 2e-2
    assert slope == pytest.approx(norm, rel=1e-3)  # float32 losses, and a third derivative

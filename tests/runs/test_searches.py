"""How estimates seek what fits, with totals that are told."""

from types import SimpleNamespace

import pytest

from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs import estimation
from qlora_wgpu.runs.estimation import largest_fitting


@pytest.mark.parametrize("total", [
    lambda n: 10 * n, lambda n: 1000 + n, lambda n: n * n, lambda n: 10 * (n // 7) + 5,
    lambda n: 5, lambda n: None, lambda n: n if n < 40 else None,
])  # fmt: skip
def test_the_largest_size_that_fits_is_found(total):
    sizes = range(1, 100)
    for budget in (1, 5, 9, 10, 39, 40, 99, 500, 990, 1050, 10**6):
        fitting = [n for n in sizes if total(n) is not None and total(n) <= budget]
        asked = []

        def noted(size, asked=asked):
            asked.append(size)
            return total(size)

        found = largest_fitting(noted, budget, sizes)
        assert found == max(fitting, default=0)
        assert len(asked) == len(set(asked)) and (not fitting or found in asked)
    assert largest_fitting(total, 5, []) == 0


def test_few_sizes_are_tried_where_totals_grow_with_them():
    asked = []
    total = lambda n: asked.append(n) or 100 + 7 * n  # noqa: E731
    assert largest_fitting(total, 100 + 7 * 12_345, range(1, 65_537)) == 12_345
    assert len(asked) <= 6


@pytest.mark.parametrize(
    ("known", "budget", "size"),
    [({10: 100}, 100, 80.0), ({1: 10}, 100, 11.0), ({100: 1000}, 10, 800.0), ({1000: 10}, 10, 2048),
     ({10: 100, 20: 200}, 150, 15.0), ({10: 100, 20: 100}, 150, 40), ({20: 100, 10: 200}, 9, 40)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_a_size_is_guessed_by_the_line_through_what_is_known(known, budget, size):
    assert estimation._interpolated(known, budget) == pytest.approx(size)


def test_lengths_are_apart():
    lengths = estimation.LENGTHS
    assert lengths[0] == 64 and lengths[1] == 128 and lengths[-1] == 65_536
    assert len(lengths) == 15 + 6 * 16 + 1 and list(lengths) == sorted(set(lengths))
    assert {960, 1024, 1088, 2048, 2176, 32_768, 34_816, 63_488} <= set(lengths)
    assert estimation.SIZES == (4, 6, 8, 12, 16, 24, 48, 80)


def test_sizes_that_fit_are_of_rows_and_of_their_length():
    total = lambda batch=3, seq=128: 10 * batch * seq  # noqa: E731
    fits = estimation._largest_sizes(total, 128, 10 * 128 * 5)
    assert (fits.batch, fits.seq) == (5, 640)
    many = estimation._largest_sizes(lambda batch=1, seq=1: 1, 1024, 10)
    assert (many.batch, many.seq) == (64, 65_536)
    assert estimation._largest_sizes(lambda batch=1, seq=1: 1, 1 << 20, 10).batch == 1


def workload(batch=4, seq=1024, *, checkpointing=False, accumulation=2, sides=1):
    step = StepOptions("train", batch, seq, checkpointing=checkpointing)
    return SimpleNamespace(step=step, accumulation=accumulation, sides=sides)


@pytest.mark.parametrize(
    ("budget", "given", "told"),
    [
        (4096, {}, ""),
        (2048, {}, "train.per_device_train_batch_size=2 train.gradient_accumulation_steps=4"),
        (3500, {}, "train.per_device_train_batch_size=3 train.gradient_accumulation_steps=3"),
        (1000, {}, "train.per_device_train_batch_size=1 train.gradient_accumulation_steps=8 "
                   "train.gradient_checkpointing=true"),
        (512, {}, "train.per_device_train_batch_size=1 train.gradient_accumulation_steps=8 "
                  "train.gradient_checkpointing=true"),
        (511, {}, "train.per_device_train_batch_size=1 train.gradient_accumulation_steps=8 "
                  "train.gradient_checkpointing=true data.max_seq_length=960"),
        (32, {}, "train.per_device_train_batch_size=1 train.gradient_accumulation_steps=8 "
                 "train.gradient_checkpointing=true data.max_seq_length=64"),
        (31, {}, ""),
        (512, {"checkpointing": True}, "train.per_device_train_batch_size=1 "
                                       "train.gradient_accumulation_steps=8"),
    ],
)  # fmt: skip
@pytest.mark.cover("all")
def test_the_cheapest_remedy_is_told(budget, given, told):
    asked = workload(**given)

    def total(batch=4, seq=1024, checkpointing=asked.step.checkpointing):
        return batch * seq // (1 + checkpointing)

    assert estimation._remedy(total, asked, budget) == told


def test_pairs_have_two_rows_each():
    asked = workload(batch=8, sides=2)
    other = StepOptions("train", 2, 1024, checkpointing=False)
    assert estimation._overrides(asked, other) == (
        "train.per_device_train_batch_size=1 train.gradient_accumulation_steps=8"
    )
    assert estimation._overrides(asked, asked.step) == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(1.4, "1 seconds"), (89.9, "90 seconds"), (90, "2 minutes"), (5399, "90 minutes"),
     (5400, "2 hours"), (36_000, "10 hours")],
)  # fmt: skip
def test_times_are_in_their_own_unit(seconds, told):
    assert estimation._duration(seconds) == told


def test_several_gpus_are_told():
    assert estimation.several_gpus_hint(0) == estimation.several_gpus_hint(1) == ""
    assert "has 2 GPUs" in estimation.several_gpus_hint(2)


def offloaded(monkeypatch, first, other, *, layers=99, least=None):
    """Rows whose totals are so many bytes a token, each for two ways to place the head."""
    monkeypatch.setattr(estimation, "LENGTHS", tuple(range(64, 1025, 64)))
    made = estimation.OffloadedRows.__new__(estimation.OffloadedRows)
    made._layout, made._row = SimpleNamespace(num_layers=layers), None
    made._plans = [
        (lambda seq, a=a: a * seq, lambda seq, b=b: b * seq)
        for a, b in zip(first, other, strict=True)
    ]
    monkeypatch.setattr(estimation, "sized", lambda row, seq: seq)
    monkeypatch.setattr(
        estimation, "Search",
        lambda layout, seq: SimpleNamespace(least=lambda: SimpleNamespace(total=least * seq)),
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("first", "other", "room", "found", "longest"),
    [
        ((10,), (10,), 6400, 0, 640),
        ((10,), (10,), 6399, 0, 576),
        ((10,), (10,), 100, 0, 0),
        ((10,), (10,), 6400, 832, 832),  # what is resident may be longer
        ((20, 10), (20, 10), 6400, 0, 640),
        ((10,), (9,), 6400, 0, 704),
        ((12,), (9,), 6400, 0, 576),  # it is too far off to be tried
        ((10,), (1,), 10_240, 0, 1024),
        ((11,), (10,), 6400, 0, 640),  # to the last byte
    ],
)
@pytest.mark.cover("all")
def test_rows_are_longest_with_the_plan_that_needs_least(
    monkeypatch, first, other, room, found, longest
):
    assert offloaded(monkeypatch, first, other).longest(room, found) == longest


@pytest.mark.parametrize(("layers", "longest"), [(8, 1024), (9, 640)])
def test_in_small_models_every_plan_is_tried(monkeypatch, layers, longest):
    rows = offloaded(monkeypatch, (10,), (10,), layers=layers, least=5)
    assert rows.longest(6400, 0) == longest

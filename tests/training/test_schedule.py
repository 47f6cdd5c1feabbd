"""Learning rates as Hugging Face's schedules give them, counted by hand."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.config.sections.train import SCHEDULES
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.batching import BatchSampler
from qlora_wgpu.training.checkpoints import RunState
from qlora_wgpu.training.optimizer import Plateau, Schedule, learning_rates, step_table
from qlora_wgpu.training.step_log import Divergence


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [0, 0.5, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0, 0.5, 1, 0.5 * (1 + 2**-0.5), 0.5, 0.5 * (1 - 2**-0.5)]),
    ],
)
def test_learning_rates(kind, expected):
    optim = OptimConfig(learning_rate=0.1, lr_scheduler_type=kind, warmup_steps=2)
    assert np.allclose(learning_rates(optim, 6), 0.1 * np.array(expected), atol=1e-12)


RECORDED = json.loads((Path(__file__).parents[1] / "fixtures/schedules.json").read_text())


def of_schedule(case, **changes):
    return OptimConfig(
        learning_rate=case["learning_rate"],
        lr_scheduler_kwargs=case["kwargs"],
        warmup_ratio=0.0,
        **changes,
    )


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in RECORDED["schedules"]}))
def test_rates_are_those_of_transformers(kind):
    cases = [case for case in RECORDED["schedules"] if case["kind"] == kind]
    assert len(cases) >= 8
    for case in cases:
        optim = of_schedule(case, lr_scheduler_type=kind, warmup_steps=case["warmup"])
        rates, expected = learning_rates(optim, case["total"]), np.array(case["rates"])
        # Both in float64: of some sums near zero the last digits differ.
        error = np.abs(rates - expected).max()
        assert error <= 1e-14 * case["learning_rate"], (error, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED["plateaus"] + RECORDED["rising"])
def test_a_plateau_is_that_of_torch(case):
    optim = of_schedule(case, lr_scheduler_type="reduce_lr_on_plateau")
    plateau, rates = Plateau(optim.learning_rate), []
    for loss in case["losses"]:
        before = plateau.rate
        assert plateau.measured(loss, optim) == (plateau.rate != before)
        rates.append(plateau.rate)
        plateau = RunState.from_json(RunState(plateau=plateau).to_json(), "state").plateau
    assert rates == case["rates"]


@pytest.mark.parametrize("case", RECORDED["rising"])
def test_a_plateau_has_the_direction_of_its_figure(case):
    kwargs = {key: value for key, value in case["kwargs"].items() if key != "mode"}
    optim = of_schedule(case | {"kwargs": kwargs}, lr_scheduler_type="reduce_lr_on_plateau")
    plateau, rates = Plateau(optim.learning_rate), []
    for figure in case["losses"]:
        plateau.measured(figure, optim, more_is_better=True)
        rates.append(plateau.rate)
    assert rates == case["rates"]


def test_a_plateau_by_default():
    optim = OptimConfig(learning_rate=0.1, lr_scheduler_type="reduce_lr_on_plateau")
    plateau = Plateau(0.1)
    losses = [1.0, *[0.99995] * 11]  # lower by less than the threshold, eleven times
    assert [plateau.measured(loss, optim) for loss in losses] == [False] * 11 + [True]
    assert plateau.rate == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("linear", {"num_cycles": 2}, "has 'num_cycles', but lr_scheduler_type: linear has no arg"),
        (
            "cosine",
            {"min_lr": 1e-5},
            "has 'min_lr', but lr_scheduler_type: cosine expects num_cycles",
        ),
        ("cosine_with_min_lr", {}, "must have either min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "must have either min_lr or"),
        ("cosine_with_min_lr", {"min_lr": 1.0}, "has min_lr, which must not be above the learning"),
        ("cosine_with_min_lr", {"min_lr_rate": "0.1"}, "has min_lr_rate, which must be a number"),
        ("cosine_with_min_lr", {"min_lr_rate": float("nan")}, "min_lr_rate, which must be a numb"),
        ("cosine_with_restarts", {"num_cycles": 1.5}, "must be an integer from 1"),
        ("cosine_with_restarts", {"num_cycles": True}, "must be an integer from 1"),
        ("polynomial", {"lr_end": 2e-4}, "must have an lr_end below the learning_rate"),
        ("warmup_stable_decay", {}, "must have num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "exp"}, "must be one of lin"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, "must be a number of at least 0 and below 1"),
    ],
)
def test_arguments_that_a_schedule_does_not_take(kind, given, message):
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs in OptimConfig .*" + message):
        OptimConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=given)


def test_warmup_ratio_rounds_up():
    rates = learning_rates(OptimConfig(lr_scheduler_type="linear", warmup_ratio=0.21), 10)
    assert rates[0] == 0 and rates[3] == rates.max()


def test_bias_corrections():
    table = step_table(OptimConfig(), 1000)
    assert table.dtype == np.float32
    assert np.allclose(table[0, 1:3], [0.1, np.sqrt(0.001)], rtol=1e-6)
    assert np.allclose(table[999, 1:3], [1.0, np.sqrt(1 - 0.999**1000)], rtol=1e-6)


def settings(**changes):
    train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, **changes}
    return Config(model={"path": "m"}, train=train)


def of(rows, config):
    return BatchSampler.of(np.full(rows, 3), config)


def flat(blocks):
    return [example for block in blocks for row in block for example in row]


def test_every_row_once_an_epoch():
    plan = of(11, settings(num_train_epochs=2))
    assert (plan.steps_per_epoch, plan.total_steps) == (2, 4)
    for epoch in range(2):
        steps = [plan.blocks(2 * epoch + i) for i in range(2)]
        assert [len(blocks) for blocks in steps] == [3, 3]
        assert sorted(flat([b for blocks in steps for b in blocks])) == list(range(11))
    assert plan.blocks(0)[0] != plan.blocks(2)[0]


def test_steps():
    assert of(11, settings(num_train_epochs=0.5)).total_steps == 1
    assert of(11, settings(max_steps=7)).total_steps == 7
    assert of(1, settings()).total_steps == 1


def test_order_and_keys_depend_on_seed_and_step_alone():
    one, two = of(50, settings(seed=1)), of(50, settings(seed=2))
    assert one.blocks(3) == of(50, settings(seed=1)).blocks(3)
    assert one.blocks(3)[0] != two.blocks(3)[0]
    keys = {s.dropout_key(step, b) for s in (one, two) for step in range(4) for b in range(4)}
    assert len(keys) == 32


NEEDED = {"cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_warmup_with_min_lr": {"min_lr": 0.0},
          "warmup_stable_decay": {"num_decay_steps": 5000}}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_has_the_rows_of_the_whole_table(kind):
    given = NEEDED.get(kind, {})
    total = 10_007
    optim = OptimConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=given, loraplus_lr_ratio=3.0)
    table, rates = step_table(optim, total), learning_rates(optim, total)
    schedule = Schedule(optim, total)
    for step in [1, 2, 300, 4096, 4097, 301, 8192, 8193, 10_007, 5]:
        assert schedule.row(step).tobytes() == table[step - 1].tobytes()
        assert schedule.rate(step) == rates[step - 1]


def test_a_rate_that_is_held():
    optim = OptimConfig(lr_scheduler_type="reduce_lr_on_plateau", loraplus_lr_ratio=4.0)
    schedule = Schedule(optim, 10)
    before = schedule.row(3).copy()
    schedule.fixed_rate = 3e-5
    assert schedule.rate(3) == 3e-5
    assert schedule.row(3)[[0, 3]].tolist() == np.float32([3e-5, 4 * 3e-5]).tolist()
    assert schedule.row(3)[[1, 2]].tolist() == before[[1, 2]].tolist()
    schedule.fixed_rate = None
    assert schedule.row(3).tobytes() == before.tobytes()


def test_a_schedule_of_a_billion_steps_takes_no_memory():
    tracemalloc.start()
    schedule = Schedule(OptimConfig(), 10**9)
    assert schedule.rate(5 * 10**8) > schedule.rate(10**9) >= 0
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_absurdly_many_epochs():
    with pytest.raises(ConfigError, match=r"num_train_epochs = 1e\+300 makes 2e\+300 steps"):
        of(11, settings(num_train_epochs=1e300))
    assert of(11, settings(num_train_epochs=1e300, max_steps=5)).total_steps == 5


def test_divergence():
    def watched(losses, norms=None, uniform=4.0):
        watch = Divergence(uniform)
        found = [watch.diverged(x, n) for x, n in zip(losses, norms or [1.0] * 99, strict=False)]
        return next((i + 1 for i, reason in enumerate(found) if reason), None), watch.ended()

    fine = [3.0, 3.4, 2.6, 3.0]
    assert watched(fine * 6) == (None, None)
    assert watched([9.0, *[7.0] * 20]) == (None, None)  # it began there
    at_once = [3.0, *[50.0] * 20]  # spoils the first five, so that they are no measure
    assert watched(at_once)[0] == 11
    assert "far above" in watched(at_once[:4])[1]
    assert watched([3.0, 3.0, 50.0])[1] is None  # one step is no proof
    dead = [3.0, 3.0, *[4.0] * 20], [1.0, 1.0, *[0.0] * 20]
    assert watched(*dead)[0] == 12
    assert watched(dead[0][:6], dead[1])[1] == "the gradient is zero"
    assert watched([3.0, *[0.0] * 20], [1.0, *[0.0] * 20]) == (None, None)  # all is learnt

"""Learning rates as Hugging Face's schedules give them, counted by hand."""

import tracemalloc

import numpy as np
import pytest

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.divergence import Divergence
from qlora_wgpu.training.schedule import Schedule, learning_rates, step_table


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
    return BatchPlan.of(np.full(rows, 3), config)


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


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_a_schedule_has_the_rows_of_the_whole_table(kind):
    optim, total = OptimConfig(lr_scheduler_type=kind, loraplus_lr_ratio=3.0), 10_007
    table, rates = step_table(optim, total), learning_rates(optim, total)
    schedule = Schedule(optim, total)
    for step in [1, 2, 300, 4096, 4097, 301, 8192, 8193, 10_007, 5]:
        assert schedule.row(step).tobytes() == table[step - 1].tobytes()
        assert schedule.rate(step) == rates[step - 1]


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

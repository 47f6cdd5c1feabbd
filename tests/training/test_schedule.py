"""Learning rates as Hugging Face's schedules give them, counted by hand."""

import numpy as np
import pytest

from qlora_wgpu.config import Config, OptimConfig
from qlora_wgpu.training.batching import BatchPlan
from qlora_wgpu.training.schedule import learning_rates, step_table


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

"""What init chooses for a run's batches, by its rows and the memory there is."""

import pytest

from qlora_wgpu.runs.recommend import (
    examples_per_step,
    first_batches,
    first_learning_rate,
    packed_length,
)


def everything(rows, length, checkpointing):
    return True


def at_most(plain, checkpointed):
    """So many tokens at once."""
    return lambda rows, length, ck: rows * length <= (checkpointed if ck else plain)


def chosen(lengths, length, limit=4096, fits=everything, *, packable=True, **device):
    device = {"is_cpu": False} | device
    return first_batches(lengths, length, limit, fits, packable=packable, **device)


def test_a_step_has_sixteen_rows_and_nothing_is_computed_twice_where_all_fits():
    first = chosen([900] * 6000, 1024)
    assert (first.rows, first.micro_batches, first.checkpointing) == (16, 1, False)
    assert (first.epochs, first.steps, first.packing) == (1, 375, False)
    software = chosen([900] * 6000, 1024, is_cpu=True)
    assert (software.rows, software.micro_batches) == (1, 16)


@pytest.mark.parametrize(
    ("plain", "checkpointed", "rows", "checkpointing"),
    [
        (4096, 9999, 4, False),
        (1024, 9999, 1, False),  # a row keeps the GPU busy: a larger one is not worth a forward
        (0, 4096, 4, True),
        (0, 1024, 1, True),
    ],
)
def test_what_does_not_fit_is_cut_before_it_is_computed_twice(
    plain, checkpointed, rows, checkpointing
):
    first = chosen([900] * 6000, 1024, fits=at_most(plain, checkpointed))
    assert (first.rows, first.checkpointing, first.has_room) == (rows, checkpointing, True)
    assert first.rows * first.micro_batches == 16


@pytest.mark.parametrize(
    ("length", "plain", "checkpointed", "rows", "checkpointing"),
    [
        (1024, 4096, 9999, 4, False),
        (1024, 0, 16384, 1, True),  # more rows would leave less room for layers that are kept
        (512, 0, 16384, 2, True),
        (512, 512, 16384, 2, True),
        (512, 0, 512, 1, True),
        (2048, 0, 16384, 1, True),
    ],
)
def test_where_layers_are_kept_as_far_as_they_fit_rows_are_few(
    length, plain, checkpointed, rows, checkpointing
):
    fits = at_most(plain, checkpointed)
    first = chosen([length - 100] * 6000, length, fits=fits, packable=False, is_bounded=True)
    assert (first.rows, first.checkpointing, first.has_room) == (rows, checkpointing, True)
    assert first.rows * first.micro_batches == 16


def test_what_is_no_longer_once_it_is_computed_twice_is_not():
    first = chosen([500] * 6000, 512, fits=at_most(512, 512), packable=False)
    assert (first.rows, first.checkpointing, first.has_room) == (1, False, True)


def test_where_nothing_fits_the_least_is_planned_and_told():
    first = chosen([900] * 6000, 1024, fits=at_most(0, 0))
    assert (first.rows, first.checkpointing, first.has_room) == (1, True, False)


def test_short_rows_share_one_and_a_step_still_has_sixteen():
    first = chosen([60] * 6000, 64)
    assert first.packing and first.length == 512 and first.examples_per_row == pytest.approx(8)
    assert first.rows * first.micro_batches == 2 and first.steps == 375
    assert not chosen([60] * 6000, 64, packable=False).packing
    assert not chosen([900] * 6000, 1024).packing


def test_rows_are_never_longer_than_the_model_takes():
    assert packed_length([60] * 100, 64, 100, 16) is None
    assert packed_length([60] * 100, 64, 128, 16) == 128


def test_small_data_has_steps_enough_to_be_learnt():
    assert [examples_per_step(n) for n in (50, 240, 1599, 1600, 10**6)] == [1, 2, 8, 16, 16]
    for rows in (24, 100, 300, 1000, 3000):
        first = chosen([200] * rows, 256)
        assert first.steps >= 75, (rows, first)
        # As many passes as a small set takes, and no step with more of it than a sixteenth.
        assert first.examples_per_row * first.rows * first.micro_batches <= 17


@pytest.mark.parametrize(
    ("width", "rate"),
    [(64, 5e-3), (128, 5e-3), (576, 1e-3), (896, 1e-3), (2048, 5e-4), (4096, 3e-4), (8192, 2e-4)],
)
def test_smaller_models_take_a_higher_rate(width, rate):
    assert first_learning_rate(width) == rate

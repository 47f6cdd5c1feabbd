"""What init chooses for a run's batches, by its rows and the memory there is."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu.config import TrainConfig
from qlora_wgpu.runs import recommend
from qlora_wgpu.runs.recommend import (
    FirstBatches,
    FirstData,
    MemoryBudget,
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


@pytest.mark.parametrize(
    ("rows", "epochs"),
    [(1, 10), (99, 10), (100, 5), (299, 5), (300, 3), (1999, 3), (2000, 2), (4999, 2), (5000, 1)],
)
def test_small_data_is_gone_through_more_often(rows, epochs):
    first = chosen([200] * rows, 256, packable=False)
    per_step = first.rows * first.micro_batches
    assert first.epochs == epochs and first.steps == epochs * -(-rows // per_step)
    assert per_step == examples_per_step(rows * epochs) and first.examples_per_row == 1


@pytest.mark.parametrize(
    ("examples", "size"), [(0, 1), (199, 1), (200, 2), (399, 2), (400, 4), (799, 4), (800, 8)]
)
def test_steps_are_halved_until_there_are_a_hundred(examples, size):
    assert examples_per_step(examples) == size


@pytest.mark.parametrize(
    ("lengths", "length", "limit", "examples", "packed"),
    [
        ([100] * 10, 128, 4096, 16, 512),  # no longer than that by themselves
        ([100] * 10, 128, 4096, 4, 256),  # nor than a step's examples
        ([100] * 10, 128, 511, 16, 256),
        ([100] * 10, 128, 512, 16, 512),
        ([100] * 10, 1024, 4096, 16, 1024),
        ([64] * 10, 128, 4096, 2, 128),
        ([65] * 10, 128, 4096, 1, None),
        ([65] * 10, 128, 4096, 2, None),  # two are longer than a row
        ([512] * 10, 1024, 4096, 2, 1024),
        ([513] * 10, 1024, 4096, 2, None),
        ([60] * 10, 64, 63, 16, None),
    ],
)
def test_rows_that_examples_share_have_room_for_two(lengths, length, limit, examples, packed):
    assert packed_length(lengths, length, limit, examples) == packed


@pytest.mark.parametrize(
    ("is_cpu", "length", "rows"),
    [(True, 512, 2), (True, 513, 1), (True, 64, 16), (False, 2048, 8), (False, 2049, 4),
     (False, 4096, 4), (False, 32_768, 1)],
)  # fmt: skip
@pytest.mark.cover("all")
def test_a_micro_batch_keeps_the_device_busy_and_no_more(is_cpu, length, rows):
    first = chosen([length] * 6000, length, 65_536, packable=False, is_cpu=is_cpu)
    assert (first.rows, first.micro_batches) == (rows, 16 // rows)


def test_rows_are_cut_at_the_length_and_padded_to_a_bucket():
    asked = []
    fits = lambda rows, length, checkpointing: asked.append(length) or True  # noqa: E731
    chosen([40] * 600, 1024, packable=False, fits=fits)
    chosen([4000] * 600, 1024, packable=False, fits=fits)
    assert set(asked) == {48, 1024}


@pytest.mark.parametrize(
    ("width", "rate"),
    [(1, 5e-3), (400, 2e-3), (800, 1e-3), (3000, 3e-4), (9000, 2e-4), (1 << 20, 1e-4)],
)
def test_rates_are_round_and_within_bounds(width, rate):
    assert first_learning_rate(width) == rate


# ---- what is told of the choice ------------------------------------------------------------------


def data_of(lengths, labels=(), **given):
    rows = [SimpleNamespace(labels=np.array(own)) for own in labels]
    given = {"objective": "sft", "are_documents": False, "are_texts": False, "length": 4} | given
    return FirstData(dataset=rows, lengths=lengths, limit=4096, **given)


def test_only_texts_and_documents_are_split_into_windows():
    lengths = [3, 4, 5, 6, 9, 10]
    assert data_of(lengths).windows(4) == lengths
    for kind in ("are_texts", "are_documents"):
        split = data_of(lengths, **{kind: True}).windows(4)
        # A last token alone predicts nothing.
        assert split == [3, 4, 4, 4, 2, 4, 4, 4, 4, 2]


def test_rows_that_stay_apart_are_not_packed():
    assert data_of([1]).is_packable
    assert not data_of([1], objective="dpo").is_packable
    assert not data_of([1], are_documents=True).is_packable


@pytest.mark.parametrize(
    ("labels", "late"),
    [
        ([[-100] * 6 + [1, 1]], True),
        ([[-100, 1, 1] + [-100] * 5], False),
        ([[-100] * 6 + [1, 1], [-100, 1, 1] + [-100] * 5], False),
        ([[-100, 1, 1]], False),
    ],
)
def test_labels_at_the_ends_of_long_rows_are_seen(labels, late):
    lengths = [len(own) for own in labels]
    assert data_of(lengths, labels).has_late_labels == late
    for kind in ("are_texts", "are_documents"):
        assert not data_of(lengths, labels, **{kind: True}).has_late_labels


BATCHES = FirstBatches(
    epochs=3, packing=False, length=4, examples_per_row=1.0, rows=2, micro_batches=4,
    checkpointing=False, steps=100, has_room=True,
)  # fmt: skip
ROOM = MemoryBudget(None, 1 << 30, "80% of all")


def by_key(settings):
    return {each.key: (each.value, each.why) for each in settings}


@pytest.mark.parametrize(
    ("changes", "bounded", "key", "expected"),
    [
        ({}, False, "train.gradient_accumulation_steps", (4, "a step has 8 rows")),
        ({"rows": 1, "micro_batches": 1}, False, "train.gradient_accumulation_steps",
         (1, "a step has 1 row")),
        ({"packing": True, "examples_per_row": 2.5}, False, "train.gradient_accumulation_steps",
         (4, "a step has 8 rows with about 20 examples")),
        ({}, False, "train.per_device_train_batch_size", (2, "fits into 80% of all")),
        ({"has_room": False}, False, "train.per_device_train_batch_size",
         (2, "needs more than 80% of all: see `qlora-wgpu estimate`")),
        ({}, True, "train.gradient_checkpointing",
         (False, "activations fit: nothing is recomputed")),
        ({"checkpointing": True}, False, "train.gradient_checkpointing",
         (True, "layers are recomputed: slower, but much less memory")),
        ({"checkpointing": True}, True, "train.gradient_checkpointing",
         (False, "layers that fit are kept; the others are recomputed")),
        ({}, False, "train.num_train_epochs", (3, "about 100 steps")),
    ],
)  # fmt: skip
@pytest.mark.cover("all")
def test_batches_are_told_with_a_reason(changes, bounded, key, expected):
    room = replace(ROOM, is_bounded=bounded)
    found = by_key(recommend._train(replace(BATCHES, **changes), room, TrainConfig()))
    assert found[key] == expected and "train.objective" not in found


@pytest.mark.parametrize(
    ("steps", "often"), [(1, 5), (20, 5), (23, 5), (24, 6), (199, 49), (204, 50), (9999, 50)]
)
def test_a_quarter_of_a_short_run_is_between_two_evaluations(steps, often):
    found = by_key(recommend._output(replace(BATCHES, steps=steps), "a b/c.."))
    assert found["eval.eval_steps"][0] == found["output.save_steps"][0] == often
    assert found["output.dir"][0] == "runs/a-b-c"
    assert by_key(recommend._output(BATCHES, "..."))["output.dir"][0] == "runs/run"


def test_a_folder_without_a_run_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert recommend._free_run("a") == "a"
    for number, name in enumerate(("a", "a-2", "a-3"), 2):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        assert recommend._free_run("a") == f"a-{number}"
    monkeypatch.setattr(recommend, "_MAX_RUNS", 4)
    assert recommend._free_run("a") == "a"


@pytest.mark.parametrize(
    ("objective", "share"), [("sft", 1), ("classification", 1), ("dpo", 10), ("kto", 10)]
)
def test_preferences_take_a_tenth_of_the_rate(objective, share):
    found = by_key(recommend._optim(2048, objective))
    assert found["optim.learning_rate"][0] == pytest.approx(5e-4 / share)
    assert ("a tenth" in found["optim.learning_rate"][1]) == (share == 10)
    assert found["optim.warmup_ratio"][0] == 0.03


def test_an_objective_is_told_unless_it_is_the_usual_one():
    assert recommend._objective(TrainConfig()) == []
    for objective, words in (("dpo", "orpo needs no"), ("kto", "undesirable")):
        found = by_key(recommend._objective(TrainConfig(objective=objective)))
        assert found["train.objective"][0] == objective and words in found["train.objective"][1]
        assert found["train.beta"][0] == 0.1
    labels = TrainConfig(objective="classification", labels=["a", "b"])
    assert by_key(recommend._objective(labels)) == {
        "train.objective": ("classification", "2 labels")
    }
    numbers = TrainConfig(objective="classification", problem_type="regression")
    found = by_key(recommend._objective(numbers))
    assert found["train.objective"][1] == "a number for each row"
    assert found["train.problem_type"][0] == "regression"


@pytest.mark.parametrize(
    ("data", "batches", "present"),
    [
        ({}, {}, {"data.packing": (False, "each example has a row of its own")}),
        ({"objective": "dpo"}, {},
         {"data.packing": (False, "each answer of a pair has a row of its own")}),
        ({}, {"packing": True, "examples_per_row": 2.5},
         {"data.packing": (True, "examples have 5 tokens: 2.5 of them share a row")}),
        ({"are_texts": True}, {}, {"data.truncation": ("windows", None)}),
        ({"are_texts": True}, {"length": 6}, {"data.truncation": None}),
        ({"labels": [[-100] * 6 + [1]]}, {}, {"data.truncation": ("keep_end", None)}),
    ],
)  # fmt: skip
@pytest.mark.cover("all")
def test_the_data_is_told_with_a_reason(data, batches, present):
    given = data_of([4, 6], **data)
    found = by_key(recommend._data(given, replace(BATCHES, **batches), ["a"], None, None, [{}]))
    for key, expected in present.items():
        assert (key in found) == (expected is not None)
        for own, told in zip(found.get(key, ()), expected or (), strict=True):
            assert told is None or own == told
    assert found["data.train"][0] == "a" and found["data.eval_split"][0] == 0.05
    assert found["data.max_seq_length"][1] == "tokens; the longest row has 6"


def test_columns_and_templates_are_told_where_they_belong():
    given = data_of([4])
    same = recommend._data(given, BATCHES, ["a", "b"], "held", "chatml", [{"text": "x"}] * 2)
    found = by_key(same)
    assert found["data.sources"][0] == [{"path": "a"}, {"path": "b"}]
    assert found["data.columns"][0] == {"text": "x"} and found["data.eval"][0] == "held"
    assert found["data.chat_template"][0] == "chatml" and "data.train" not in found
    other = by_key(recommend._data(given, BATCHES, ["a", "b"], None, None, [{"text": "x"}, {}]))
    assert other["data.sources"][0] == [{"path": "a", "columns": {"text": "x"}}, {"path": "b"}]
    assert "data.columns" not in other and "data.chat_template" not in other

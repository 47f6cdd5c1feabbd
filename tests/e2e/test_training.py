"""Training runs on a tiny model, and what they leave behind."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.observing import observed

from e2e.tiny import VOCAB, write_model
from qlora_wgpu import Config, LoraConfig, QLoRAModel, Trainer, load_config
from qlora_wgpu.errors import ConfigError, DataError, OutOfMemoryError, TrainingError
from qlora_wgpu.training import Observer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("m") / "tiny")


def rows(count=12, seed=0):
    """Sequences that go up by one: something to learn."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        ids = (rng.integers(0, VOCAB) + np.arange(rng.integers(8, 30))) % VOCAB
        samples.append({"input_ids": ids.tolist(), "labels": ids.tolist()})
    return samples


def config(folder, out, **sections):
    given = {
        "model": {"path": str(folder)},
        "data": {"max_seq_length": 32},
        "train": {
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
        "optim": {"learning_rate": 1e-2},
        "eval": {"eval_steps": 3},
        "output": {"dir": str(out), "save_steps": 2},
    }
    for name, values in sections.items():
        given[name] = {**given.get(name, {}), **values}
    return Config(**given)


def opened(folder, device, seed=0, **lora):
    lora = LoraConfig(r=4, lora_alpha=8, **lora)
    return QLoRAModel.from_pretrained(folder, lora, device=device, seed=seed)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.quick
def test_a_run_learns_and_leaves_its_files(folder, device, tmp_path):
    out, settings = tmp_path / "run", config(folder, tmp_path / "run", train={"max_steps": 12})
    model = opened(folder, device)
    result = Trainer(model, settings).train(rows(), rows(4, seed=1))
    assert result.steps == 12 and result.eval_loss < result.eval_loss_before - 0.3
    logged = [row for row in metrics(out) if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 13))
    keys = {"step", "loss", "mean_token_accuracy", "learning_rate", "grad_norm", "num_tokens"}
    assert all(set(row) == keys | {"tokens_per_second"} for row in logged)
    assert logged[-1]["num_tokens"] == result.num_tokens
    evaluated = [row for row in metrics(out) if "eval_loss" in row]
    assert [row["step"] for row in evaluated] == [0, 3, 6, 9, 12]
    assert load_config(out / "config.yaml") == settings
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-10", "step-12"]

    again = opened(folder, device)
    again.load_adapter(result.adapter_dir)
    held_out = rows(4, seed=1)
    total = count = right = 0
    for row in held_out:
        loss, n, _ = again.summed_loss([([row["input_ids"]], [row["labels"]], None)])
        total, count = total + loss, count + n
        ids = np.array(row["input_ids"])
        right += int(np.sum(again.logits(ids[None])[0, :-1].argmax(axis=1) == ids[1:]))
    # The same sums in batches of another shape.
    assert abs(total / count - result.eval_loss) < 1e-4
    # Few labels are hit, and none by a hair: the share is the same.
    assert 0 < right < count and evaluated[-1]["eval_mean_token_accuracy"] == right / count


def test_one_seed_gives_one_adapter(folder, device, tmp_path):
    adapters = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        model = opened(folder, device, seed=seed, lora_dropout=0.2)
        settings = config(folder, tmp_path / name, train={"seed": seed})
        Trainer(model, settings).train(rows())
        adapters.append((tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]
    assert adapters[0] != adapters[2]


def test_dropout_acts_in_training_and_not_in_gradients(folder, device):
    model = opened(folder, device, lora_dropout=0.5)
    state = {n: np.full_like(a, 0.05) for n, a in model.adapter_state_dict().items()}
    model.load_adapter(state)
    ids = np.arange(20)[None] % VOCAB
    checked = model.checked(ids, ids)

    def loss(key):
        model.zero_gradient()
        model.accumulate(*checked, dropout_key=key)
        return float(model.read_stats()[0])

    assert loss(1) == loss(1) != loss(2)
    assert loss(None) == pytest.approx(19 * model.loss_and_grads(ids, ids)[0], rel=1e-6)


class Warnings(Observer):
    def __init__(self):
        self.texts = []

    def warning(self, text):
        self.texts.append(text)


def test_a_step_without_labels_is_skipped_with_a_warning(folder, device, tmp_path):
    data = rows(8)
    for row in data[:-1]:
        row["labels"] = [-100] * len(row["labels"])
    watcher = Warnings()
    train = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    model = opened(folder, device)
    Trainer(model, config(folder, tmp_path / "r", train=train), callbacks=observed(watcher)).train(
        data
    )
    assert len(watcher.texts) == 3 and "label" in watcher.texts[0]
    losses = [row["loss"] for row in metrics(tmp_path / "r")]
    assert losses.count(None) == 3
    assert all(np.isfinite(a).all() for a in model.adapter_state_dict().values())


def test_nothing_is_made_or_read_inside_a_step(folder, device, tmp_path, monkeypatch):
    calls, step = [], [0]
    for owner, name in (
        (type(device.raw), "create_buffer"),
        (type(device.raw), "create_bind_group"),
        (type(device.raw), "create_compute_pipeline"),
        (type(device.raw.queue), "read_buffer"),
    ):
        original = getattr(owner, name)

        def counted(self, *args, _original=original, _name=name, **kwargs):
            calls.append((step[0], _name))
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    class Steps(Observer):
        def step(self, row):
            step[0] = row["step"]

    data = [row for row in rows(24) if len(row["input_ids"]) <= 32]
    settings = config(folder, tmp_path / "r", output={"save_steps": 100})
    Trainer(opened(folder, device), settings, callbacks=observed(Steps())).train(data)
    assert any(name == "create_bind_group" for s, name in calls if s == 0)
    assert [c for c in calls if 1 <= c[0] < 6] == []


def test_a_gradient_that_is_not_finite_ends_the_run(folder, device, tmp_path):
    class Spoil(Observer):
        def saved(self, path):
            if path.name == "step-2":
                flat = model.read_flat(model.adapter.parameters).copy()
                flat[:] = np.nan
                model.write_parameters(flat)

    model = opened(folder, device)
    with pytest.raises(TrainingError, match=r"no longer finite at step 3.*checkpoints"):
        Trainer(model, config(folder, tmp_path / "r"), callbacks=observed(Spoil())).train(rows())
    assert (tmp_path / "r" / "checkpoints" / "step-2" / "adapter_model.safetensors").exists()


def test_a_base_that_is_not_finite_is_told_as_that(folder, device, tmp_path):
    model = opened(folder, device)
    model.write_parameters(np.full_like(model.read_flat(model.adapter.parameters), np.nan))
    with pytest.raises(TrainingError, match="step 1, before the first update: the base"):
        Trainer(model, config(folder, tmp_path / "r")).train(rows())


@pytest.mark.slow
def test_a_run_is_not_overwritten(folder, device, tmp_path):
    model, settings = opened(folder, device), config(folder, tmp_path / "r")
    Trainer(model, settings).train(rows())
    before = (tmp_path / "r" / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="already contains a run"):
        Trainer(model, settings).train(rows())
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == before
    Trainer(model, settings, overwrite=True).train(rows())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "empty"),
        ([{"input_ids": [1, VOCAB], "labels": [1, 2]}], "vocab_size"),
        ([{"input_ids": [1, 2], "labels": [1]}], "labels"),
        ([{"input_ids": [1, 2], "labels": [-100, -100]}], "no label"),
        ([{"words": "x"}], r"train_dataset\[0\]: a row must have 'messages'"),
        ([{"input_ids": [1, 2]}, {"text": "x"}], r"train_dataset\[1\] must have input_ids"),
        ([{"input_ids": [1, 2], "labels": [1, -1]}], "token id -1"),
        ([{"input_ids": [1, 2], "labels": [1, -100]}], "no label"),  # the first is never predicted
    ],
)
def test_data_that_does_not_fit(folder, device, tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        Trainer(opened(folder, device), config(folder, tmp_path / "r")).train(data)
    assert not (tmp_path / "r").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        ([], "eval_dataset is empty"),
        ([{"input_ids": [1, 2], "labels": [1, -100]}], "eval_dataset has no labels"),
        ([{"input_ids": [1, 2], "labels": [1, 999]}], r"eval_dataset\[0\].*999"),
    ],
)
def test_held_out_data_that_does_not_fit(folder, device, tmp_path, held_out, message):
    with pytest.raises(DataError, match=message):
        Trainer(opened(folder, device), config(folder, tmp_path / "r")).train(rows(), held_out)
    assert not (tmp_path / "r").exists()


def test_a_held_out_loss_that_is_not_finite_ends_the_run(folder, device, tmp_path):
    class Spoil(Observer):
        def saved(self, path):
            if path.name == "step-2":
                model.write_parameters(np.full(model.adapter.length, np.nan, np.float32))

    model = opened(folder, device)
    settings = config(folder, tmp_path / "r", train={"max_steps": 2})
    with pytest.raises(TrainingError, match=r"held-out loss is not finite after step 2"):
        Trainer(model, settings, callbacks=observed(Spoil())).train(rows(), rows(4, seed=1))
    assert (tmp_path / "r" / "checkpoints" / "step-2" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "r" / "adapter").exists()
    assert [row["step"] for row in metrics(tmp_path / "r")] == [0, 1, 2]


@pytest.mark.full
def test_how_a_step_is_cut_does_not_matter(folder, device, tmp_path):
    """4 rows at once, 2 and 2, or one by one: with labels of unlike number in each row."""
    adapters, logged = [], []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        out = tmp_path / str(batch)
        train = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "compute_dtype": "float32",
        }
        lora = LoraConfig(r=4, lora_alpha=8)
        model = QLoRAModel.from_pretrained(folder, lora, None, "float32", device)
        Trainer(model, config(folder, out, train=train)).train(rows())
        adapters.append(model.adapter_state_dict())
        logged.append([(row["loss"], row["grad_norm"], row["num_tokens"]) for row in metrics(out)])
    for state, log in zip(adapters[1:], logged[1:], strict=True):
        assert np.allclose(log, logged[0], rtol=2e-4, atol=0)
        for name, array in state.items():
            # AdamW turns rounding of a gradient near zero into steps of the whole rate.
            error = np.linalg.norm(array - adapters[0][name]) / np.linalg.norm(array)
            assert error < 1e-2, (name, error)


def test_logged_rows_are_means_over_their_steps(folder, device, tmp_path):
    logs = []
    for every in (1, 3):
        settings = config(folder, tmp_path / str(every), log={"logging_steps": every})
        Trainer(opened(folder, device), settings).train(rows())
        logs.append(metrics(tmp_path / str(every)))
    each, rare = logs
    assert [row["step"] for row in rare] == [3, 6]
    for i, row in enumerate(rare):
        window = each[3 * i : 3 * i + 3]
        low, high = min(r["loss"] for r in window), max(r["loss"] for r in window)
        assert low < row["loss"] < high
        for key in ("grad_norm", "num_tokens", "learning_rate"):
            assert row[key] == window[-1][key], key
    weights = np.diff([0, *(row["num_tokens"] for row in each[:3])]) - 4  # first tokens: no label
    assert rare[0]["loss"] == pytest.approx(
        np.average([row["loss"] for row in each[:3]], weights=weights), rel=1e-5
    )


def test_rates_in_the_log_are_the_schedule(folder, device, tmp_path):
    optim = {"learning_rate": 1e-2, "lr_scheduler_type": "linear", "warmup_steps": 2}
    Trainer(opened(folder, device), config(folder, tmp_path / "r", optim=optim)).train(rows())
    rates = [row["learning_rate"] for row in metrics(tmp_path / "r")]
    assert rates == pytest.approx([0, 5e-3, 1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_ctrl_c_saves_what_there_is(folder, device, tmp_path):
    class Stop(Observer):
        def step(self, row):
            if row["step"] == 3:
                raise KeyboardInterrupt

    model = opened(folder, device)
    result = Trainer(model, config(folder, tmp_path / "r"), callbacks=observed(Stop())).train(
        rows()
    )
    assert result.interrupted and 3 <= result.steps < 6
    assert (result.adapter_dir / "adapter_model.safetensors").exists()
    state = tmp_path / "r" / "checkpoints" / f"step-{result.steps}" / "trainer_state.json"
    assert json.loads(state.read_text())["step"] == result.steps


def test_a_checkpoint_is_an_adapter_with_its_state(folder, device, tmp_path):
    model = opened(folder, device)
    Trainer(model, config(folder, tmp_path / "r")).train(rows())
    last = tmp_path / "r" / "checkpoints" / "step-6"
    final = tmp_path / "r" / "adapter"
    name = "adapter_model.safetensors"
    assert (last / name).read_bytes() == (final / name).read_bytes()
    moments = load_file(last / "optimizer.safetensors")
    state = model.adapter_state_dict()
    kinds = ("exp_avg", "exp_avg_sq")
    assert set(moments) == {f"{kind}.{n}" for kind in kinds for n in state}
    for n, array in state.items():
        assert all(moments[f"{kind}.{n}"].shape == array.shape for kind in kinds)
        assert (moments[f"exp_avg_sq.{n}"] >= 0).all() and moments[f"exp_avg_sq.{n}"].any()


def test_the_memory_plan_is_what_is_taken(tmp_path):
    from qlora_wgpu.config import QuantConfig
    from qlora_wgpu.gpu.device import Device
    from qlora_wgpu.model.memory_plan import plan_training_memory

    folder, fresh = write_model(tmp_path / "m"), Device()
    model = opened(folder, fresh)
    planned = plan_training_memory(
        model.folder.config, model.adapter.config, QuantConfig(), "bfloat16", batch_size=2,
        seq=32, gradient_checkpointing=True, max_binding=fresh.max_binding, profile=fresh.profile,
        keep_dequantized="auto", is_cpu=fresh.is_cpu,
    )  # fmt: skip
    Trainer(model, config(folder, tmp_path / "r")).train(
        [{"input_ids": list(range(32)), "labels": list(range(32))}] * 4
    )
    taken = fresh.memory.by_kind
    for kind in ("activations", "base", "adapter", "gradients", "optimizer", "norms"):
        assert taken[kind] == planned[kind], kind


def test_want_of_memory_in_a_step_keeps_the_steps_before(folder, device, tmp_path, monkeypatch):
    whole = config(folder, tmp_path / "whole")
    Trainer(opened(folder, device), whole).train(rows())

    settings = config(folder, tmp_path / "run", output={"save_steps": 100})
    model, batches = opened(folder, device), []
    accumulate = QLoRAModel.accumulate

    def exhausted(self, *args, **kwargs):
        batches.append(args)
        if len(batches) == 8:  # the second half of the fourth step
            raise OutOfMemoryError("there is no memory for another thing")
        return accumulate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(QLoRAModel, "accumulate", exhausted)
        with pytest.raises(OutOfMemoryError, match="saved after step 3: resume=True continues it"):
            Trainer(model, settings).train(rows())
    Trainer(opened(folder, device), settings, resume=True).train(rows())
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_too_short_for_its_warm_up_says_that_it_learns_nothing(folder, device, tmp_path):
    class Told(Observer):
        warnings = ()

        def warning(self, text):
            self.warnings += (text,)

    told = {}
    for steps in (1, 2):
        optim = {"learning_rate": 1e-2, "warmup_ratio": 0.03}
        settings = config(folder, tmp_path / f"{steps}", optim=optim, train={"max_steps": steps})
        told[steps] = Told()
        Trainer(opened(folder, device), settings, callbacks=observed(told[steps])).train(rows())
    assert not told[2].warnings
    [text] = told[1].warnings
    assert "warm-up takes 1 of the run's 1 steps, and the last has 0;" in text

"""Whole runs over answers: resumed, packed, cut into other micro-batches, measured, refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.observing import observed

import qlora_wgpu
from e2e.tiny import write_model, write_pairs
from qlora_wgpu import Config, QLoRAModel, Trainer
from qlora_wgpu.data import load_dataset
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.errors import ConfigError, DataError, TrainingError
from qlora_wgpu.runs.estimation import estimate
from qlora_wgpu.training import Observer
from qlora_wgpu.training.executor import LocalExecutor
from qlora_wgpu.training.preferences import preference_of
from qlora_wgpu.training.references import ReferenceModel

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
OBJECTIVES = {"dpo": {}, "orpo": {}, "kto": {}, "ipo": {"objective": "dpo", "loss_type": "ipo"}}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("preferences")
    write_model(base / "model")
    write_pairs(base / "pairs.jsonl")
    return base


class Plan(Observer):
    """Keeps what was planned, and stops where it is told to."""

    def __init__(self, stop_after=None):
        self.bytes, self._after = 0, stop_after

    def planned(self, memory):
        self.bytes = sum(memory.values())

    def step(self, row):
        if row["step"] == self._after:
            self.stop_run()


LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}


def config(folder, name, objective="dpo", data=None, lora=LORA, **train):
    own = {"objective": objective, **OBJECTIVES[objective]}
    return {
        "model": {"path": str(folder / "model")},
        "lora": lora,
        "quant": {"scheme": "none"},
        "data": {
            "train": str(folder / "pairs.jsonl"), "eval_split": 4, "max_seq_length": 64,
            **(data or {}),
        },
        "train": {
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
            "compute_dtype": "float32", **own, **train,
        },
        "optim": {"learning_rate": 5e-3, "warmup_ratio": 0.0},
        "output": {"dir": str(folder / name), "save_steps": 2},
    }  # fmt: skip


def run(folder, name, *args, observer=None, resume=False, **options):
    settings = config(folder, name, *args, **options)
    result = qlora_wgpu.train(settings, callbacks=observed(observer or Plan()), resume=resume)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row.pop("tokens_per_second", None)
    return result, rows, load_file(folder / name / "adapter" / "adapter_model.safetensors")


def same(one, other, close=0.0):
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=0, atol=close * np.abs(array).max())


@pytest.fixture(scope="module")
def mixed(folder):
    """A second source, whose columns have other names; of KTO's, judged answers."""
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    others = [{columns[key]: value for key, value in row.items()} for row in rows[:5]]
    judged = [
        {"prompt": row["prompt"], "answer": row[side], "is_good": side == "chosen"}
        for row in rows[:4]
        for side in ("chosen", "rejected")
    ]
    for name, written in (("others", others), ("judged", judged)):
        text = "".join(json.dumps(row) + "\n" for row in written)
        (folder / f"{name}.jsonl").write_text(text)
    of_judged = {"completion": "answer", "label": "is_good"}
    return {
        "dpo": {"path": str(folder / "others.jsonl"), "columns": columns},
        "kto": {"path": str(folder / "judged.jsonl"), "columns": of_judged},
    }


@pytest.mark.parametrize(("objective", "rows_of_epoch"), [("dpo", 10), ("kto", 16)])
def test_a_mixture_of_sources_goes_on_with_the_same_bits(folder, mixed, objective, rows_of_epoch):
    sources = [{"path": str(folder / "pairs.jsonl"), "weight": 1}, mixed[objective] | {"weight": 1}]
    data = {"train": None, "sources": sources, "eval_split": None}
    _, rows, adapter = run(folder, f"mixed-{objective}", objective, data=data)
    counted = [row["sources"] for row in rows if "loss" in row]
    assert list(counted[0]) == ["pairs.jsonl", Path(sources[1]["path"]).name]
    ends = [min(4 * step, rows_of_epoch) for step in (1, 2, 3)]  # the last step may be short
    assert [sum(each.values()) for each in counted[:3]] == ends
    run(folder, f"mixed-parts-{objective}", objective, data=data, observer=Plan(stop_after=2))
    _, again, parts = run(folder, f"mixed-parts-{objective}", objective, data=data, resume=True)
    same(adapter, parts)
    assert again == rows


@pytest.mark.quick
def test_a_source_of_another_kind_is_a_sentence(folder):
    (folder / "texts.jsonl").write_text('{"text": "a b c"}\n')
    sources = [{"path": str(folder / "pairs.jsonl")}, {"path": str(folder / "texts.jsonl")}]
    with pytest.raises(DataError, match=r"texts\.jsonl line 1: .*rows with 'chosen' and"):
        run(folder, "wrong", "dpo", data={"train": None, "sources": sources, "eval_split": None})


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_run_learns_and_goes_on_with_the_same_bits(folder, objective):
    whole = Plan()
    result, rows, adapter = run(folder, f"whole-{objective}", objective, observer=whole)
    assert result.eval_loss < result.eval_loss_before
    steps = [row for row in rows if "loss" in row]
    assert len(steps) == 4 and all(name in row for row in steps for name in METRICS)
    assert all(f"eval_{name}" in rows[0] for name in METRICS)
    # TRL has it of DPO alone: over chosen answers.
    known = steps[0]["mean_token_accuracy"] is not None
    assert known == ("eval_mean_token_accuracy" in rows[0]) == (objective in ("dpo", "ipo"))
    assert ("kl" in steps[0]) == (objective == "kto")
    assert ("log_odds_chosen" in steps[0]) == (objective == "orpo")
    assert ("rewards/accuracies" in steps[0]) == (objective != "kto")
    if objective != "orpo":  # the reference is the model as it begins
        assert steps[0]["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert whole.bytes == result.peak_bytes
    run(folder, f"parts-{objective}", objective, observer=Plan(stop_after=2))
    _, again, parts = run(folder, f"parts-{objective}", objective, resume=True)
    same(adapter, parts)
    assert again == rows


def test_other_micro_batches_learn_the_same(folder):
    _, _, whole = run(folder, "one-of-four", per_device_train_batch_size=4,
                      gradient_accumulation_steps=1)  # fmt: skip
    for name, options in {
        "four-of-one": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        "not-checkpointed": {"gradient_checkpointing": False},
    }.items():
        _, _, parts = run(folder, name, **options)
        same(whole, parts, 2e-3)  # after four steps of AdamW, which divides by small gradients


def test_packed_pairs_are_whole(folder):
    _, rows, _ = run(folder, "plain-row")
    _, packed, _ = run(folder, "packed-row", data={"packing": True})
    losses = [[row["eval_loss"] for row in each if "eval_loss" in row] for each in (rows, packed)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_packed_pairs_may_be_longer_than_a_row(folder, objective):
    """Each answer fits into max_seq_length, but not the two that share a row."""
    how = PreprocessConfig(64, objective=objective)
    pairs = load_dataset(folder / "pairs.jsonl", folder / "model", 64, how=how)
    lengths = pairs.lengths.reshape(-1, 2)
    data = {"max_seq_length": int(lengths.max()), "eval_split": None}
    # One step of all pairs, however they are cut.
    steps = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 1}
    found = {}
    for packing in (False, True):
        name, data["packing"] = f"long-{objective}-{packing}", packing
        _, rows, _ = run(folder, name, objective, data, **steps)
        found[packing] = next(row for row in rows if "grad_norm" in row)
    assert found[True]["loss"] == pytest.approx(found[False]["loss"], rel=1e-5)
    assert found[True]["grad_norm"] == pytest.approx(found[False]["grad_norm"], rel=1e-3)
    longest = int(lengths.sum(axis=1).max())
    planned = estimate(config(folder, "none", objective, data), by_data=True).workload.step.seq
    assert data["max_seq_length"] < longest <= planned


def test_eval_measures_what_training_did(folder):
    result, rows, _ = run(folder, "measured")
    found = qlora_wgpu.evaluate(str(folder / "measured"))
    last = [row for row in rows if "eval_loss" in row][-1]
    assert found.adapter.loss == pytest.approx(result.eval_loss, rel=1e-4)
    assert found.base.loss == pytest.approx(np.log(2), rel=1e-5)
    for name, value in found.adapter.metrics.items():
        assert value == pytest.approx(last[f"eval_{name}"], rel=1e-3, abs=1e-4), name


@pytest.mark.quick
def test_the_estimate_counts_both_rows_of_a_pair(folder):
    settings = config(folder, "none")
    both = estimate(settings)
    settings["train"]["objective"] = "sft"
    settings["train"]["per_device_train_batch_size"] = 4
    assert both.workload.step.batch == 4
    assert both.memory["activations"] >= estimate(settings).memory["activations"]


@pytest.mark.full
def test_dropout_goes_on_with_the_same_bits(folder):
    lora = LORA | {"lora_dropout": 0.5}
    _, rows, dropped = run(folder, "dropped", lora=lora)
    run(folder, "dropped-parts", lora=lora, observer=Plan(stop_after=2))
    _, again, parts = run(folder, "dropped-parts", lora=lora, resume=True)
    same(dropped, parts)
    assert again == rows
    _, plain, without = run(folder, "kept")
    assert all((dropped[name] != array).any() for name, array in without.items())
    # Before an adapter does anything, neither does what it drops: nor is the reference's dropped.
    assert rows[0] == plain[0]
    assert rows[1]["rewards/chosen"] == pytest.approx(0, abs=1e-5)


@pytest.mark.cover(objective=["kto"])
@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ("dpo", {}),
        ("kto", {}),
        ("dpo", {"trainable_token_indices": [5, 7]}),  # no other adapter may stand beside these
        ("kto", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    ],
)
def test_eval_measures_a_run_against_the_adapter_that_it_went_on_from(folder, objective, more):
    first, again = (f"{which}-{objective}-{len(more)}" for which in ("first", "second"))
    begun, _, _ = run(folder, first, objective, lora=LORA | more)
    lora = LORA | more | {"init_from": str(begun.adapter_dir)}
    before = qlora_wgpu.evaluate(config(folder, again, objective, lora=lora))
    result, rows, _ = run(folder, again, objective, lora=lora)
    assert rows[0]["eval_loss"] == pytest.approx(np.log(2) if objective == "dpo" else 0.5, rel=1e-4)
    found = qlora_wgpu.evaluate(str(folder / again))
    assert found.adapter.loss == pytest.approx(result.eval_loss, rel=1e-4)
    assert found.base.loss != pytest.approx(rows[0]["eval_loss"], rel=5e-3)  # not the reference
    assert before.adapter is None and before.base.tokens == found.base.tokens
    assert before.base.loss == pytest.approx(found.base.loss, rel=1e-6)
    last = [row for row in rows if "eval_loss" in row][-1]
    for name, value in found.adapter.metrics.items():
        assert value == pytest.approx(last[f"eval_{name}"], rel=1e-3, abs=1e-4), name


@pytest.mark.quick
def test_token_ids_are_no_answers(folder, device):
    settings = Config.model_validate(config(folder, "ids", data={"eval_split": None}))
    model = QLoRAModel.from_pretrained(folder / "model", device=device)
    with pytest.raises(DataError, match="not token ids"):
        Trainer(model, settings).train([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}])


def test_a_run_goes_on_with_its_own_reference(folder, device):
    """The model that goes on must be the one that the run began with."""
    run(folder, "reference", observer=Plan(stop_after=2))
    settings = Config.model_validate(config(folder, "reference"))
    lora, quant = settings.lora, settings.quant
    model = QLoRAModel.from_pretrained(folder / "model", lora, quant, "float32", device)
    model.write_parameters(model.adapter.initial(0) + 0.01)
    with pytest.raises(ConfigError, match="log probabilities of the reference model"):
        Trainer(model, settings, resume=True).train()


def test_a_beta_that_overflows_is_told_as_that(folder):
    told = "before the first update: train.beta is 1e-20; set it closer to 0.1"
    for measured in (4, None):
        with pytest.raises(TrainingError, match=told):
            run(folder, f"beta-{measured}", "ipo", {"eval_split": measured}, beta=1e-20)


def test_dft_learns(folder, tmp_path):
    rows = [{"prompt": f"{i} and {i}? ", "completion": f"{i}{i}."} for i in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(folder, "dft", loss_type="dft")
    settings["train"]["objective"] = "sft"
    settings["data"] |= {"train": str(path)}
    result = qlora_wgpu.train(settings, callbacks=observed(Plan()))
    assert result.train_loss > 0 and result.eval_loss < result.eval_loss_before


@pytest.mark.quick
def test_what_a_reference_said_is_told_apart_by_all_that_is_trained(folder):
    """A fresh adapter is the base, whatever its seed; one that changes the embedding is not."""
    keys = [
        key_of(folder, {"target_modules": ["embed_tokens"]}, start)
        for start in (
            lambda model: model.adapter.split(model.adapter.initial(seed=1)),
            lambda model: model.adapter.split(model.adapter.initial(seed=2)),
            lambda model: {n: a + np.float32(0.1) for n, a in model.adapter_state_dict().items()},
        )
    ]
    assert keys[0] == keys[1] != keys[2]


def test_what_a_reference_said_is_told_apart_by_how_its_adapter_is_applied(folder):
    """The same numbers of another scaling, or in another layer, are another reference."""
    ways = ({}, {"lora_alpha": 64}, {"use_rslora": True}, {"layers_to_transform": [0]},
            {"layers_to_transform": [1]})  # fmt: skip
    changed = lambda model: {  # noqa: E731
        name: a + np.float32(0.1) for name, a in model.adapter_state_dict().items()
    }
    keys = [key_of(folder, {"target_modules": ["q_proj"], **way}, changed) for way in ways]
    assert len(set(keys)) == len(ways)
    dropping = {"target_modules": ["q_proj"], "lora_dropout": 0.5}  # the reference drops nothing
    assert key_of(folder, dropping, changed) == keys[0]


def test_what_a_reference_said_is_told_apart_by_tokens_that_are_added(folder, monkeypatch):
    """Data without them have the same ids, but every token's share is of one more."""
    keys = []
    key = ReferenceModel.key
    monkeypatch.setattr(ReferenceModel, "key", lambda asked: keys.append(key(asked)) or keys[-1])
    for name, tokens in (("without", []), ("with", ["<new>"])):
        settings = config(folder, f"key-{name}", data={"eval_split": None}, max_steps=1)
        settings["model"]["add_tokens"] = tokens
        qlora_wgpu.train(settings, callbacks=observed(Plan()))
    assert keys[0] != keys[1]


def key_of(folder, lora, start):
    """The name under which is kept what a reference says."""
    settings = Config.model_validate(config(folder, "unused", lora={"r": 2, **lora}))
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    dataset = load_dataset(rows, folder / "model", 16, how=PreprocessConfig(16, objective="dpo"))
    model = QLoRAModel.from_pretrained(folder / "model", settings.lora, settings.quant, "float32")
    model.load_adapter(start(model))
    preference = preference_of(settings.train)
    return ReferenceModel(model, LocalExecutor(model), dataset, preference, 2, 16).key()

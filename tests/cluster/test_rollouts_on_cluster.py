"""GRPO and RLOO on a cluster: the completions, metrics and adapter of one device."""

import json

import pytest
from cluster.answer_runs import Told
from cluster.dying_worker import FOLDER, METHODS, DyingWorker
from e2e.tiny import write_model

from qlora_wgpu.cluster import owner
from qlora_wgpu.runs import train
from qlora_wgpu.selfcheck import results


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts")
    write_model(folder / "model", num_hidden_layers=1)
    rows = [{"prompt": text} for text in ("abc", "de f", "gh, i", "jkl.")]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(results, "check_launches", lambda *given: [])
        yield folder


def heaviest(completion_ids, **_):
    """A reward that hardly any two completions share."""
    return [sum(ids) / 100 for ids in completion_ids]


def run(place, name, workers=0, told=None, **sections):
    given = {
        "model": {"path": str(place / "model")},
        "lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]},
        "data": {"train": str(place / "prompts.jsonl"), "max_seq_length": 8},
        "train": {
            "objective": "grpo", "max_steps": 2, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, "compute_dtype": "float32",
        },
        "grpo": {"num_generations": 4, "max_completion_length": 8, "log_completions": True},
        "optim": {"learning_rate": 1e-2, "lr_scheduler_type": "constant"},
        "eval": {"eval_steps": 0},
        "output": {"dir": str(place / name), "save_steps": 1},
        "cluster": {},
    }  # fmt: skip
    if workers:
        given["cluster"] = {"scheduler": "local", "workers": workers, "patience": 120.0}
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    return train(given, told, reward_funcs=[heaviest])


def traces(place, name):
    """All that a run leaves and that must be the same bits."""
    rows = [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        for key in ("tokens_per_second", "generation_share", "workers"):
            row.pop(key, None)
    samples = (place / name / "samples.jsonl").read_text()
    moments = sorted((place / name).glob("checkpoints/*/optimizer.safetensors"))
    files = [place / name / "adapter/adapter_model.safetensors", *moments]
    return rows, samples, [file.read_bytes() for file in files]


CASES = {
    "on policy": {},
    "several steps, with a reference": {
        "train": {"gradient_accumulation_steps": 2, "max_steps": 3},
        "grpo": {"num_iterations": 2, "beta": 0.1},
        "lora": {"lora_dropout": 0.2},
    },
    "rloo": {"train": {"objective": "rloo"}, "data": {"eval_split": 1}, "eval": {"eval_steps": 2}},
}


@pytest.mark.slow
@pytest.mark.cover(case=["several steps, with a reference"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_has_the_bits_of_one_device(place, clusters, case):
    sections = CASES[case]
    for count in (0, 2):
        run(place, f"{case}-{count}", count, **sections)
    alone, shared = (traces(place, f"{case}-{count}") for count in (0, 2))
    assert shared == alone
    assert all(row["grad_norm"] > 0 for row in alone[0] if "loss" in row)
    (cluster,) = clusters
    asked = [method for method, _ in cluster.asked]
    assert ("complete", 2) in cluster.asked  # each worker has a part
    assert asked.count("token_logps") == (0 if case == "on policy" else 4)


@pytest.mark.full
def test_an_adapter_that_is_continued_is_part_of_the_reference(place, clusters):
    run(place, "before")
    lora = {"init_from": str(place / "before" / "adapter")}
    for count in (0, 2):
        run(place, f"continued-{count}", count, lora=lora, grpo={"beta": 0.5})
    rows, *_ = alone = traces(place, "continued-0")
    assert traces(place, "continued-2") == alone
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0


@pytest.mark.full
def test_a_worker_that_is_lost_in_generation_changes_nothing(place, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(owner, "MOST_AT_ONCE", 2)  # so that each worker has several blocks
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for method in METHODS:
        if method != "complete":
            (tmp_path / method).touch()  # as if it had been lost there
    monkeypatch.setattr("qlora_wgpu.runs.cluster.Worker", DyingWorker)
    told = Told()
    for count in (0, 2):
        run(place, f"lost-{count}", count, told, train={"max_steps": 1})
    assert traces(place, "lost-2") == traces(place, "lost-0")
    assert (tmp_path / "complete").exists()
    assert any("its blocks go to other workers" in text for text in told.texts)

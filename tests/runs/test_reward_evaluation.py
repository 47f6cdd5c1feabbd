"""Evaluation of GRPO's adapters by their reward functions."""

import json

import pytest
from e2e.tiny import write_model, write_tokenizer

from qlora_wgpu import Config, evaluate, train
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.training import read_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with evaluations before and after two steps."""
    folder = write_model(tmp_path_factory.mktemp("rewarded"))
    write_tokenizer(folder)
    rows = [{"prompt": text} for text in ("abc", "de f", "gh, i", "jkl.", "mn", "op")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        model={"path": str(folder)}, quant={"scheme": "none"}, lora={"r": 4},
        data={"train": str(folder / "rows.jsonl"), "eval_split": 2, "max_seq_length": 32},
        train={
            "objective": "grpo", "max_steps": 2, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1, "compute_dtype": "float32",
        },
        grpo={
            "reward_funcs": [{"regex": {"pattern": "[a-h]"}}, {"length": {"target": 4}}],
            "num_generations": 4, "num_generations_eval": 3, "max_completion_length": 6,
        },
        optim={"learning_rate": 0.2}, eval={"load_best_model_at_end": False},
        output={"dir": str(folder / "run")},
    )  # fmt: skip
    train(config, quiet=True)
    return folder / "run"


@pytest.mark.slow
def test_the_metrics_are_those_of_the_runs_own_evaluations(run):
    result = evaluate(run)
    before, after = (row for row in read_rows(run / "metrics.jsonl") if "eval_reward" in row)
    for logged, found in ((before, result.base), (after, result.adapter)):
        own = {key.removeprefix("eval_"): v for key, v in logged.items() if key != "step"}
        assert own == {"loss": found.loss, **found.metrics} and found.tokens == 6
    assert result.base.metrics != result.adapter.metrics


@pytest.mark.slow
def test_answers_are_not_compared(run):
    with pytest.raises(ConfigError, match=r"is not supported with train\.objective: grpo"):
        evaluate(run, generate=True)

"""Runs under random budgets: what is planned is taken, and no bit of an adapter changes.

A drawn run is made on a device that only takes memory: its plan's peak is what it takes, without a
budget, with random ones, and with the least that it tells of; below that is a sentence. Every few
trials a run is computed as well, with a budget and without.

``python -m campaigns.budgets --count N --seed S``
"""

from __future__ import annotations

import gc
import json
import random
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.test_family_types import normalize, shapes
from e2e.tiny import write_chats, write_tokenizer
from references.seeded import weights
from references.sized import traced_configs, with_head_dim
from safetensors.numpy import save_file
from support.allocating import allocating_device

from campaigns.support import Tally, campaign
from qlora_wgpu import Config
from qlora_wgpu.config.values import MIN_WITHOUT_UNIT
from qlora_wgpu.errors import OutOfMemoryError, QLoRAError
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE
from qlora_wgpu.limits import MIB
from qlora_wgpu.runs.training import train
from qlora_wgpu.training import Observer

NEAR = 0.01  # of what is taken, how far the plan may be from it
EVERY = 8  # trials, of which one is computed
_PROFILES = {"cpu": CPU_PROFILE, "gpu": GPU_PROFILE}


class Plans(Observer):
    """Keeps what is told of memory."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.notes: list[str] = []

    def planned(self, memory: Any) -> None:
        self.memory.append(sum(memory.values()))

    def note(self, text: str) -> None:
        self.notes.append(text)


class Runs:
    """Runs of one drawn model on one device.

    Args:
        case: The model and its run.
        place: An empty folder.
        device: Computes, or only takes memory.
    """

    def __init__(self, case: Drawn, place: Path, device: Device) -> None:
        self._place, self._device, self._count = place, device, 0
        self._settings = case.written(place)

    def run(self, budget: int | None = None) -> tuple[int, int, str, bytes]:
        """A run's planned bytes, those that it took, what waited, and its adapter."""
        gc.collect()
        device, plans, self._count = self._device, Plans(), self._count + 1
        memory = device.memory
        before, memory.peak = memory.total, memory.total
        output = self._place / str(self._count)
        settings = {
            **self._settings, "output": {"dir": str(output)},
            "device": {} if budget is None else {"memory": budget},
        }  # fmt: skip
        device.budget = None if budget is None else budget + before
        try:
            train(Config.model_validate(settings), plans)
        finally:
            device.budget = None
        waits = next((text for text in plans.notes if text.startswith("to keep within")), "")
        adapter = (output / "adapter" / "adapter_model.safetensors").read_bytes()
        return plans.memory[-1], memory.peak - before, waits, adapter


def within_budgets(runs: Runs, rng: random.Random, times: int) -> str:
    """What is wrong with plans and what they take; nothing otherwise."""
    planned, taken, _, _ = runs.run()
    if abs(planned - taken) > NEAR * taken:
        return f"without a budget {planned:,} bytes are planned and {taken:,} are taken"
    try:
        runs.run(MIN_WITHOUT_UNIT)
        return f"a budget of {MIN_WITHOUT_UNIT:,} bytes is enough"
    except OutOfMemoryError as err:
        told = re.search(r"at least ([\d,]+) MiB", str(err))
        if told is None or "\n" in str(err):
            return f"too little is told so: {err}"
    least = int(told[1].replace(",", "")) * MIB
    budgets = [least, *(rng.randint(least, max(least, planned - 1)) for _ in range(times))]
    for budget in budgets:
        try:
            less, taken, waits, _ = runs.run(budget)
        except OutOfMemoryError as err:
            return f"of {planned:,} bytes a budget of {budget:,} (least {least:,}) fails: {err}"
        if taken > budget or abs(less - taken) > NEAR * taken:
            return (
                f"of {budget:,} bytes {less:,} are planned and {taken:,} are taken, {waits}, "
                f"and {planned:,} without a budget"
            )
    if least > MIB and rng.random() < 0.3:
        try:
            less = runs.run(least - MIB)[0]
            return f"at least {least:,} are said to be needed, and {less:,} do"
        except OutOfMemoryError:
            pass
    return ""


def same_bits(runs: Runs, rng: random.Random) -> str:
    """Whether a computed run's adapter depends on its budget."""
    planned, taken, _, expected = runs.run()
    if abs(planned - taken) > NEAR * taken:
        return f"computed, {planned:,} bytes are planned and {taken:,} are taken"
    share = rng.choice((0.0, rng.random(), 0.99))
    budget = max(int(planned * share), MIN_WITHOUT_UNIT)
    try:
        _, taken, waits, got = runs.run(budget)
    except OutOfMemoryError as err:
        told = re.search(r"at least ([\d,]+) MiB", str(err))
        if told is None:
            return f"too little is told so: {err}"
        budget = int(told[1].replace(",", "")) * MIB
        _, taken, waits, got = runs.run(budget)
    if taken > budget:
        return f"computed, a budget of {budget:,} becomes {taken:,}"
    return "" if got == expected else f"another adapter with a budget of {budget:,}: {waits}"


def trial(case: Drawn, rng: random.Random, place: Path, *, computed: bool) -> str:
    """What is wrong with a drawn run.

    Raises:
        QLoRAError: If the run is refused, whatever its budget.
    """
    with pytest.MonkeyPatch.context() as patch:
        if computed:
            device = Device()
            patch.setattr("qlora_wgpu.runs.training.open_device", lambda *given: device)
            patch.setattr("qlora_wgpu.runs.opening.verified_layout", lambda *given: given[3])
        else:
            device = allocating_device(patch)
        device.profile = _PROFILES.get(case.profile, device.profile)
        runs = Runs(case, place, device)
        return same_bits(runs, rng) if computed else within_budgets(runs, rng, 1)


def run(count: int, seed: int, tally: Tally, *, every: int = EVERY) -> None:
    """Draws runs, of which one in so many is computed."""
    for number in range(tally.first, tally.first + count):
        if tally.over:
            return
        rng = random.Random(f"{seed} {number}")
        case = drawn(rng)
        computed = number % every == every - 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what PEFT leaves out
                    wrong = trial(case, rng, Path(folder), computed=computed)
            except QLoRAError as err:
                tally.add(f"refused: {str(err).split(chr(10))[0][:90]}")
                continue
            except Exception as err:
                wrong = f"{type(err).__name__}: {err}"
        if wrong:
            how = f"--seed {seed} --first {number} --count 1: {wrong}; {case.family}, "
            how += f"{case.profile}, {json.dumps(case.settings)}"
            tally.fail("computed" if computed else "planned", how)
        else:
            tally.add("computed, the same bits" if computed else "planned, as taken")


OBJECTIVES = ("sft", "sft", "dpo", "orpo", "kto")


@dataclass(frozen=True)
class Drawn:
    """A model and a run of it.

    Attributes:
        family: Of ``traced_configs``.
        config: Its config.json.
        settings: The run's sections, without its paths.
        profile: ``own``, ``cpu`` or ``gpu``: how kernels are cut.
    """

    family: str
    config: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    profile: str

    def written(self, place: Path) -> dict[str, dict[str, Any]]:
        """Writes model and data; the settings of a run with them."""
        model = place / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(self.config))
        save_file(normalize(weights(*shapes(self.config))), model / "model.safetensors")
        write_tokenizer(model)
        objective = self.settings["train"]["objective"]
        rows = place / "rows.jsonl"
        if objective == "sft":
            write_chats(rows, rows=14)
        else:
            rows.write_text("".join(json.dumps(row) + "\n" for row in _answers(objective)))
        settings = {name: dict(values) for name, values in self.settings.items()}
        settings["model"] = {"path": str(model), **settings.get("model", {})}
        settings["data"]["train"] = str(rows)
        return settings


def drawn(rng: random.Random, family: str | None = None) -> Drawn:
    """A run; not every combination is one that is computed."""
    configs = traced_configs()
    family = family or rng.choice(sorted(configs))
    config = _config(rng, configs[family])
    architecture = find_family(config).read(config)
    objective = rng.choice(OBJECTIVES)
    train: dict[str, Any] = {
        "objective": objective,
        "max_steps": 2,
        "per_device_train_batch_size": 2 if objective == "kto" else rng.choice((1, 2)),
        "gradient_accumulation_steps": rng.choice((1, 2, 3)),
        "gradient_checkpointing": rng.random() < 0.5,
        "compute_dtype": rng.choice(("bfloat16", "float32")),
        "gradient_dtype": rng.choice(("float32", "float32", "bfloat16")),
    }
    data: dict[str, Any] = {"max_seq_length": rng.choice((40, 64, 100))}
    if rng.random() < 0.5:
        data["eval_split"] = 4
    if objective == "sft":
        data["packing"] = rng.random() < 0.4
        train["neftune_noise_alpha"] = rng.choice((0.0, 0.0, 5.0))
    lora = _lora(rng, architecture)
    if "modules_to_save" in lora:
        train["gradient_dtype"] = "float32"  # another one is refused
    settings: dict[str, dict[str, Any]] = {
        "lora": lora,
        "quant": {
            "scheme": rng.choice(("nf4", "nf4", "none")),
            "double_quant": rng.random() < 0.5,
        },
        "data": data,
        "train": train,
        "optim": {
            "name": rng.choice(("adamw", "adamw_8bit", "lion")), "learning_rate": 1e-3,
        },
    }  # fmt: skip
    settings["eval"] = {"sample_max_new_tokens": 3}
    if rng.random() < 0.3:
        settings["eval"]["sample_prompts"] = ["is a1 " * rng.choice((1, 9)), "b2?"]
    return Drawn(family, config, settings, rng.choice(("own", "cpu", "gpu")))


def _config(rng: random.Random, recorded: dict[str, Any]) -> dict[str, Any]:
    """Larger vocabularies and more layers than were recorded."""
    config = with_head_dim(recorded, rng.choice((24, 24, 64)))
    config["vocab_size"] = rng.choice((331, 3000, 9000, 20_000))
    if "vocab_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = config["vocab_size"]
    if config["max_position_embeddings"] == 64:
        config["max_position_embeddings"] = 256
    if "tie_word_embeddings" in config and rng.random() < 0.3:
        config["tie_word_embeddings"] = not config["tie_word_embeddings"]
    if not {"num_kv_shared_layers", "per_layer_config", "no_rope_layers"} & config.keys():
        times = rng.choice((1, 1, 2))
        config["num_hidden_layers"] *= times
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = config[name] * times
    return config


def _lora(rng: random.Random, architecture: Architecture) -> dict[str, Any]:
    lora: dict[str, Any] = {
        "r": rng.choice((3, 8, 40)),
        "lora_dropout": rng.choice((0.0, 0.0, 0.1)),
        "use_dora": rng.random() < 0.2,
    }
    names = sorted({spec.name.rsplit(".", 1)[-1] for spec in architecture.linears})
    if rng.random() < 0.6:
        lora["target_modules"] = rng.sample(names, rng.randint(1, len(names)))
        if not architecture.tied and rng.random() < 0.4:
            lora["target_modules"].append("lm_head")
    kind = rng.choice(("none", "none", "tokens", "embedding", "head", "both"))
    if kind == "tokens":
        lora["trainable_token_indices"] = [0, 5, architecture.vocab_size - 1]
    elif kind != "none" and architecture.tied:
        lora |= {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    elif kind != "none":
        both = {"embedding": ["embed_tokens"], "head": ["lm_head"]}
        lora["modules_to_save"] = both.get(kind, ["embed_tokens", "lm_head"])
    return lora


def _answers(objective: str) -> list[dict[str, Any]]:
    """Pairs, or with KTO answers that are wanted or not."""
    rng, rows = random.Random(0), []
    for number in range(14):
        a, b = rng.randrange(10), rng.randrange(10)
        prompt = [{"role": "user", "content": f"what is {a} and {b}?"}]
        good = [{"role": "assistant", "content": f"{a}{b}."}]
        bad = [{"role": "assistant", "content": f"{b}{a}" * rng.randint(1, 5)}]
        if objective == "kto":
            wanted = number % 2 == 0
            rows.append({"prompt": prompt, "completion": good if wanted else bad, "label": wanted})
        else:
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return rows


if __name__ == "__main__":
    campaign("runs under budgets", run, 400)

"""Runs of tiny models, drawn at random: family, objective, adapter, optimizer, data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.test_family_types import normalize, shapes
from e2e.tiny import write_chats, write_tokenizer
from references.seeded import weights
from references.sized import traced_configs, with_head_dim
from safetensors.numpy import save_file

from qlora_wgpu.families.family import Architecture, find_family

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

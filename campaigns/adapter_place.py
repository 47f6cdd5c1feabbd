"""A kind of adapter in a folder of its own: its runs, what opens it, what else gives its logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from support.commands import run_here

from campaigns.adapter_kinds import VOCAB, Kind
from campaigns.adapter_outcomes import outcome_of, require
from qlora_wgpu import QLoRAModel, QuantConfig

IDS = np.random.default_rng(7).integers(5, VOCAB, (2, 20))
PLAIN = QuantConfig(scheme="none")
WEIGHTS = "adapter/adapter_model.safetensors"
_MODEL = Path(__file__).parents[1]


class Walked:
    """A kind of adapter in a folder of its own.

    Attributes:
        exact: By verb, logits that PyTorch has to give, too, and the case that computes them.
        tasks: What PyTorch is asked for.
    """

    llama_library: ClassVar[str | None] = None
    _plain: ClassVar[dict[str, Path]] = {}

    def __init__(self, place: Path, kind: Kind) -> None:
        self.place, self.kind = place, kind
        self.slug = kind.slug
        self.run = place / self.slug
        self.base = place / kind.base_path
        self.yaml = place / f"{self.slug}.yaml"
        self.exact: dict[str, tuple[Any, str]] = {}
        self.tasks: list[dict[str, Any]] = []
        self.base_logits = np.zeros(0)

    def _config(self, out: str) -> dict[str, Any]:
        return {
            "model": {"path": str(self.base), **self.kind.model},
            "quant": {"scheme": "none"},
            "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, **self.kind.lora},
            "data": {"train": str(self.place / "train.jsonl"),
                     "eval": str(self.place / "eval.jsonl"), "max_seq_length": 128},
            "train": {"max_steps": 24, "gradient_accumulation_steps": 2,
                      "compute_dtype": "float32"},
            "optim": {"learning_rate": 2e-2, "lr_scheduler_type": "constant"},
            "eval": {"sample_max_new_tokens": 8},
            "output": {"dir": str(self.place / out), "save_steps": 6},
        }  # fmt: skip

    def _write_yaml(self) -> None:
        self.yaml.write_text(json.dumps(self._config(self.slug)))

    def _do(self, *args: Any) -> str:
        done = run_here(*args, cwd=self.place)
        return outcome_of(done)

    def _folder(self) -> Path:
        return self.run if self.kind.peft is None else self.run / "adapter"

    def _opening(self) -> list[str]:
        if self.kind.peft is None:
            return []
        return ["--model", str(self.base), "--scheme", "none",
                "--compute-dtype", "float32"]  # fmt: skip

    def _opened(self, adapter: Path | None) -> QLoRAModel:
        return QLoRAModel.from_pretrained(
            self.base, quant=PLAIN, compute_dtype="float32", adapter=adapter
        )

    def _logits(self, adapter: Path | None) -> Any:
        with self._opened(adapter) as model:
            return model.logits(IDS)

    def _rows(self) -> int | None:
        added = len(self.kind.model.get("add_tokens", ()))
        return VOCAB + added if added else None

    def _beside(self) -> Path:
        """A plain adapter of the same base."""
        if self.kind.base not in self._plain:
            out = self.place / f"beside-{self.kind.base}"
            config = self._config(out.name)
            config["lora"] = {"r": 3, "lora_alpha": 8}
            config["model"] = {"path": str(self.base)}
            config["train"]["max_steps"] = 4
            (self.place / f"{out.name}.yaml").write_text(json.dumps(config))
            self._do("train", f"{out.name}.yaml")
            self._plain[self.kind.base] = out
        return self._plain[self.kind.base]

    def _base_gguf(self) -> Path:
        """The base alone in GGUF: with an adapter that does nothing."""
        path = self.place / f"{self.kind.base}.gguf"
        if not path.exists():
            nothing = self.place / f"{self.kind.base}-nothing"
            with self._opened(None) as model:
                model.save_adapter(nothing)
            self._do("export", "--model", self.base, "--adapter", nothing,
                     "--gguf", path, "--type", "f32", "--scheme", "none", "--no-check")  # fmt: skip
        return path

    def _ask_torch(self, verb: str, exact: Any, **task: Any) -> None:
        case = f"{self.slug}-{verb}"
        self.tasks.append({"case": case, "ids": IDS.tolist(), **task})
        self.exact[verb] = exact, case

    def _ask_llama(self, model: Path, adapter: Path | None, exact: Any) -> None:
        if self.llama_library is None:
            return
        asked = [sys.executable, "-m", "campaigns.adapter_walk_llama", self.llama_library,
                 str(model), str(adapter or ""), json.dumps(IDS.tolist()),
                 str(self.run / "llama.npy")]  # fmt: skip
        done = subprocess.run(asked, cwd=_MODEL, capture_output=True, text=True, check=False)
        require(done.returncode == 0, f"llama.cpp: {done.stderr[-300:]}")
        theirs = np.load(self.run / "llama.npy")[..., : exact.shape[-1]]
        apart = np.linalg.norm(theirs - exact) / np.linalg.norm(exact)
        # GELU is a table in float16 there.
        most = 2e-3 if self.kind.base == "gemma" else 1e-5
        require(apart < most, f"llama.cpp's logits are {apart:.1e} apart")

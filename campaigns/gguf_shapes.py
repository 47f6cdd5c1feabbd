"""Models of random shapes as GGUF files, read by llama.cpp: every family that is exported.

A drawn model with an adapter is merged into a file, of which llama.cpp computes logits. They are
held to those of base and adapter in NumPy, and the file that is read back here must have the same.
What llama.cpp computes otherwise has to be refused, or noted, in a sentence.

``LLAMA_CPP=LIBRARY python -m campaigns.gguf_shapes --count N --seed S`` (LIBRARY as in
``tests/references/llama_cpp.py``), with FAMILIES=MODEL_TYPE,... for some
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from e2e.test_family_types import normalize, shapes
from references import numpy_model
from references.llama_cpp import LlamaCpp
from references.seeded import weights
from support.gguf_models import CHANGES, VOCABULARY, adapter_of

from campaigns.drawn_configs import FAMILIES, FULL, SLIDING, Config, drawn_config, rope
from campaigns.drawn_models import met, write_model
from campaigns.support import Tally, campaign
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import QLoRAError, UnsupportedModelError
from qlora_wgpu.exporting.gguf import gguf_model
from qlora_wgpu.exporting.gguf_tensors import find_file_type
from qlora_wgpu.exporting.merge import MergedWeights
from qlora_wgpu.families.family import Architecture, find_family
from qlora_wgpu.gguf.architectures import BY_MODEL_TYPE as ARCHITECTURES

# Norm of the difference over that of the logits. llama.cpp's GELU is a table in float16.
CLOSE = {"f32": 1e-4, "f16": 0.03, "q8_0": 0.1}
TABLE = 0.01
DRAWS = 6
SIZES = ("size", "heads", "hidden_layers", "dim", "num_experts", "layer_types", "per_tok", "window")


def exported_config(rng: random.Random, model_type: str) -> Config:
    """A drawn config.json, mostly with what llama.cpp has where it has not everything."""
    config = drawn_config(rng, model_type)
    architecture = ARCHITECTURES[model_type]
    if rng.random() < 0.15:
        return config
    given = CHANGES.get(model_type, {})
    config |= {
        key: value for key, value in given.items()
        if not any(word in key for word in SIZES)
    }  # fmt: skip
    layers, period = config["num_hidden_layers"], rng.randint(1, 4)
    if architecture.windows == "every other":
        period = 2
    if architecture.windows in ("every other", "periodic"):
        config["layer_types"] = [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)]
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = config["head_dim"]
    if rng.random() < 0.5 and "rope_type" in config.get("rope_parameters", {}):
        config |= rope(rng, config.get("head_dim", 64), "default linear")
    if architecture.is_square and "head_dim" in config:
        config["hidden_size"] = config["num_attention_heads"] * config["head_dim"]
    if architecture.head != "own or tied":
        config["tie_word_embeddings"] = architecture.head == "tied"
    if "linear_key_head_dim" in config:
        config |= {"linear_value_head_dim": config["linear_key_head_dim"], "rms_norm_eps": 1e-6}
    for key in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"):
        if config.get(key):
            config[key] = min(config[key], 64)  # llama.cpp's graphs have no room for hundreds
    for key in ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias"):
        if key in config and rng.random() < 0.7:
            config[key] = False
    return config


def theirs(library: str, path: str, ids: list[int]) -> np.ndarray:
    """llama.cpp's logits, in a process that it may end."""
    model = LlamaCpp(library).open(path)
    logits: np.ndarray = model.logits(ids)
    model.close()
    return logits


class Campaign:
    """Trials and what they showed."""

    def __init__(self, seed: int, tally: Tally) -> None:
        self.seed, self.tally = seed, tally
        self.library = os.environ["LLAMA_CPP"]
        self.process = self._begun()
        self.worst: dict[str, tuple[float, str]] = {}

    def trial(self, number: int, model_type: str) -> None:
        """One drawn model in one type of file; the next one where it is refused, some times."""
        rng = random.Random(f"{self.seed} {number} {model_type}")
        how = f"--seed {self.seed} --first {number} --count 1 (FAMILIES={model_type})"
        for _ in range(DRAWS):
            if self._drawn(rng, model_type, how):
                break

    def _drawn(self, rng: random.Random, model_type: str, how: str) -> bool:
        """Whether a drawn model is exported."""
        name = rng.choice(("f32", "f32", "f16", "q8_0"))
        config = exported_config(rng, model_type)
        count = rng.choice((1, 2, 17, 65, 130))
        if "short_factor" in str(config):
            count = 130  # llama.cpp chooses factors by the room for a text, not by its length
        ids = [rng.randrange(config["vocab_size"]) for _ in range(count)]
        how += f", {name}, {count} tokens"
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._compare(Path(folder), config, name, ids, how)
            except UnsupportedModelError as err:
                self.tally.add(f"refused: {str(err)[:110]}")
                return False
            except Exception as err:
                if os.environ.get("RAISE"):
                    raise
                self.tally.fail(type(err).__name__, f"{how}: {str(err)[:400]}; {config}")
        return True

    def _compare(self, place: Path, config: Config, name: str, ids: list[int], how: str) -> None:
        write_model(place, config, normalize(weights(*shapes(config))))
        adapter_of(place, config, scale=0.15)
        merged = MergedWeights(place, place / "adapter")
        made = gguf_model(merged, find_file_type(name), lambda size: VOCABULARY)
        path = place / "model.gguf"
        made.write(path, lambda tensor: None)
        exact = numpy_model.logits(config, _arrays(merged.architecture, merged.float32), ids)
        noted = "; ".join(note for note in made.notes if note.startswith("llama.cpp"))
        if "window" in noted and len(ids) <= config["sliding_window"]:
            noted = ""
        try:
            back = ModelFolder.open(path)
            architecture = find_family(back.config).read(back.config)
            arrays = _arrays(architecture, partial(_float32, back))
            again = numpy_model.logits(back.config, arrays, ids)
            self._judge(f"read back, {name}", again, exact, name, config, how, noted=bool(noted))
        except QLoRAError as err:
            self.tally.fail("not read back", f"{how}: {str(err)[:300]}; {config}")
            again = exact
        try:
            there = self.process.submit(theirs, self.library, str(path), ids).result()
        except BrokenProcessPool:
            self.process = self._begun()
            self.tally.fail("llama.cpp ends", f"{how}; {config}")
        except RuntimeError as err:
            self.tally.fail("llama.cpp refuses", f"{how}: {str(err)[:300]}; {config}")
        else:
            kind = f"llama.cpp, {name}" + (f", noted: {noted[:80]}" if noted else "")
            self._judge(kind, there, again, name, config, how, noted=bool(noted))

    def _judge(
        self, kind: str, got: np.ndarray, exact: np.ndarray, name: str, config: Config, how: str,
        *, noted: bool = False,
    ) -> None:  # fmt: skip
        off = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
        off = off if np.isfinite(off) else np.inf
        table = "gelu" in ARCHITECTURES[config["model_type"]].activation
        bound = max(CLOSE[name], TABLE if table else 0.0)
        if name != "f32" and ("back" in kind or met(config)):
            bound = 1.5  # what the type itself rounds, through random layers and to other experts
        place = f"{config['model_type']}, {kind}"
        self.worst[place] = max(self.worst.get(place, (0.0, "")), (off, how))
        if off <= bound or noted:
            self.tally.add(kind)
        else:
            self.tally.fail(kind, f"{how}: {off:.1e}; {config}")

    def _begun(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"))


def _arrays(architecture: Architecture, read: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    return {name: read(name) for name in numpy_model.names(architecture)}


def _float32(folder: ModelFolder, name: str) -> np.ndarray:
    return folder[name].read()


def run(count: int, seed: int, tally: Tally) -> None:
    """So many trials of every family that is exported, or of those that FAMILIES names."""
    warnings.simplefilter("ignore")
    only = os.environ.get("FAMILIES", "")
    types = only.split(",") if only else sorted(set(ARCHITECTURES) & set(FAMILIES))
    if not os.environ.get("LLAMA_CPP"):
        sys.exit("this campaign compares with llama.cpp: name its library in LLAMA_CPP")
    tried = Campaign(seed, tally)
    for number in range(tally.first, tally.first + count):
        for model_type in types:
            if not tally.over:
                tried.trial(number, model_type)
    for place, (value, how) in sorted(tried.worst.items()):
        print(f"  {value:8.1e}  {place}: {how}")
    tried.process.shutdown()


if __name__ == "__main__":
    campaign("GGUF files of random shapes", run, 1)

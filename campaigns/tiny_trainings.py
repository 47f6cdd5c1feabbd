"""Trainings of tiny models of all families: what a wrong shader may change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from e2e.test_family_types import normalize, shapes
from references.seeded import adapter, weights
from references.sized import traced_configs, with_head_dim
from safetensors.numpy import save_file

from campaigns.shader_mutants import Key, Loader
from qlora_wgpu.config import LoraConfig, OptimConfig, QuantConfig
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.gpu.limits import ALIGNMENT
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.program import Program
from qlora_wgpu.graph.tensor import Storage, ceil_div, vector
from qlora_wgpu.model.batch_encoding import encode_batch, segments
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.model.steps import TrainingOptions
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.ops.loss import Objective
from qlora_wgpu.ops.optimizers import OptimizerConfig, OptimizerState, adamw
from qlora_wgpu.selfcheck.runner import POISON
from qlora_wgpu.training.optimizer import Optimizer

# What rounding may change of a result, relative to the largest value of its tensor.
ROUNDING = {"float32": 2e-5, "bfloat16": 2.0**-8}
_ROWS, _SEQ, _PROMPT = 3, 45, 13


_OBJECTIVE = Objective(0.1, 0.01)


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    family: str
    head_dim: int
    scheme: str = "nf4"
    dora: bool = False
    dropout: float = 0.2
    noise: float = 5.0
    objective: Objective = _OBJECTIVE
    checkpointing: bool = True
    vocab: int = 331
    activation: str = ""


def cases() -> list[Case]:
    """All families, their options in turn, and Llama with several."""
    plain = {"dropout": 0.0, "noise": 0.0, "objective": Objective(), "checkpointing": False}
    trained = [
        Case("llama", 64),
        Case("llama", 24, "none", dora=True, **plain),
        Case("qwen2", 64, dora=True, **plain),
        Case("llama", 128, "none", dropout=0.2, noise=0.0, vocab=1500),
    ]
    for index, family in enumerate(sorted(traced_configs())):
        options: dict[str, Any] = plain if index % 2 else {}
        trained.append(Case(family, (24, 64)[index // 2 % 2], **options))
    trained.append(Case("starcoder2", 64, activation="gelu"))
    trained.append(Case("llama", 24, activation="gelu"))
    return trained


class Training:
    """A model in one type, its kernels cut for one profile, and its right results.

    Attributes:
        keys: The variants of shaders that run.
    """

    def __init__(
        self, case: Case, folder: Path, device: Device, profile: Profile, dtype: str, load: Loader
    ) -> None:
        self.case, self._device, self._dtype, self._load = case, device, dtype, load
        config = with_head_dim(traced_configs()[case.family], case.head_dim)
        config["vocab_size"] = case.vocab
        if case.activation:
            config["hidden_act"] = case.activation
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True)
            save_file(normalize(weights(*shapes(config))), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(config))
        lora = LoraConfig(r=5, lora_alpha=10, lora_dropout=case.dropout, use_dora=case.dora)
        load.asked.clear()
        self.layout = ModelPlan(
            Pretrained.open(folder), lora, QuantConfig(scheme=case.scheme), dtype,
            profile=profile, max_binding=device.max_binding,
        )  # fmt: skip
        self.options = TrainingOptions(case.checkpointing, case.objective, case.noise)
        self.plans = [
            self.layout.step(self.options.step("train", _ROWS, _SEQ)).plan,
            *self._others(),
        ]
        self.keys = {_key(launch) for plan in self.plans for launch in plan.launches}
        self._programs: list[Program] = []
        self._right: dict[str, np.ndarray] | None = None

    def _others(self) -> Iterator[Plan]:
        """The plans of generation and of the update, traced as ``_prepare`` makes them."""
        layout, cache = self.layout, KVCache(_PROMPT + 3)
        for length in (_PROMPT, 1):
            batch = make_batch_buffers(1, length, CacheView(cache))
            hidden, head, logits = layout.logits_graphs(batch)
            yield compile_plan(hidden)
            yield compile_plan(head, (logits,))
        graph, adapter = layout.new_graph(), layout.adapter
        info = vector("info", 4, "float32", Storage("info", "inputs", 16))
        flat = (adapter.parameters, adapter.gradient, adapter.first_moment, adapter.second_moment)
        adamw(
            graph,
            OptimizerState(*flat[:2], flat[2:], info, layout.stats, adapter.b_begin),
            OptimizerConfig(),
        )
        yield compile_plan(graph)

    def _prepare(self) -> None:
        model = QLoRAModel(self.layout, self._device, options=self.options)
        self._model = model
        parts = model.adapter.split(model.adapter.initial(0))
        values = normalize(adapter({name: a.shape for name, a in parts.items()}))
        self._parameters = model.adapter.join(values)
        self._optimizer = Optimizer(model, OptimConfig(learning_rate=1e-2, weight_decay=0.1), 3)
        self._batch, self._step = model.programs.step(self.options.step("train", _ROWS, _SEQ))
        cache = KVCache(_PROMPT + 3)
        self._decoding = [
            model.programs.logits(make_batch_buffers(1, length, CacheView(cache)))
            for length in (_PROMPT, 1)
        ]
        self._programs = [self._step, self._optimizer._program]
        for decoding in self._decoding:
            self._programs += [decoding.hidden, decoding.head]
        launched = {_key(launch) for p in self._programs for launch in p.plan.launches}
        assert launched == self.keys

    def changed(self) -> str:
        """What the mutant that is loaded changes: the result's name, or nothing."""
        with self._load.right():
            self._measure()
        assert self._right is not None
        kept = [list(program.dispatches) for program in self._programs]
        try:
            for program in self._programs:
                self._rebind(program)
            wrong = self._results()
        finally:
            for program, dispatches in zip(self._programs, kept, strict=True):
                program.dispatches[:] = dispatches
        same_gradient = np.array_equal(wrong["gradient"], self._right["gradient"])
        for name, right in self._right.items():
            if name.startswith("updated") and not same_gradient:
                continue  # AdamW makes much of rounding where a gradient is nearly nothing
            if self._differs(name, wrong[name], right):
                return name
        return ""

    def _measure(self) -> None:
        """Computes the right results, twice the same."""
        if self._right is None:
            self._prepare()
            self._right = self._results()
            again = self._results()
            assert all(np.array_equal(self._right[n], again[n]) for n in again), self.case
            assert all(np.isfinite(a).all() for a in again.values()), self.case

    def _differs(self, name: str, wrong: np.ndarray, right: np.ndarray) -> bool:
        if name == "gradient":
            split = self._model.adapter.split
            pairs = zip(split(wrong).values(), split(right).values(), strict=True)
        else:
            pairs = zip([wrong], [right], strict=True)
        return any(not _near(w, r, ROUNDING[self._dtype]) for w, r in pairs)

    def _rebind(self, program: Program) -> None:
        """Puts wrong shaders in the place of right ones."""
        offset = 0
        for index, launch in enumerate(program.plan.launches):
            at, offset = offset, offset + (ALIGNMENT if launch.params else 0)
            if not self._load.changes(_key(launch)):
                continue
            shader = self._load.shader(_key(launch))
            windows = {name: program._window(tensor) for name, tensor in launch.tensors.items()}
            if launch.params:
                windows["params"] = (program._uniforms, at, len(launch.params))
            group = self._device.bind_group(shader, windows)
            pipeline = self._device.pipeline(shader)
            program.dispatches[index] = (pipeline, group, launch.workgroups)

    def _poison(self) -> None:
        for program in self._programs:
            plan = program.plan
            for slot, size, texture in zip(program._slots, plan.slots, plan.textures, strict=True):
                write = self._device.write_texture if texture else self._device.write
                write(slot, np.full(ceil_div(size, 4), POISON, np.uint32))

    def _results(self) -> dict[str, np.ndarray]:
        model, device = self._model, self._device
        flat = model.adapter
        self._poison()
        model.write_parameters(self._parameters)
        model.write_flat(flat.gradient, np.full(flat.length, 0.25, np.float32))
        for index, moment in enumerate((flat.first_moment, flat.second_moment)):
            model.write_flat(moment, np.full(flat.length, 0.1 * index, np.float32))
        model.zero_stats()
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.case.vocab, (_ROWS, _SEQ))
        mask = np.ones_like(ids)
        mask[0, :20], mask[0, 20:] = 1, 2
        mask[1, -7:] = 0
        targets = np.where(rng.random(ids.shape) < 0.7, ids, -100)
        targets[1, -8:] = -100
        assert segments(mask).max() > 1
        for key in (3, 4):
            data = encode_batch(self._batch, ids, mask, targets, dropout_key=key)
            device.write(self._batch.storage.buffer, data)
            self._step.run()
        results = {"stats": model.read_stats().copy()}
        results["gradient"] = model.read_flat(flat.gradient).copy()
        self._optimizer.step(1)
        results["updated stats"] = model.read_stats().copy()
        for name, tensor in (("updated parameters", flat.parameters),
                             ("updated first moment", flat.first_moment),
                             ("updated second moment", flat.second_moment),
                             ("updated gradient", flat.gradient)):  # fmt: skip
            results[name] = model.read_flat(tensor).copy()
        model.write_parameters(self._parameters)
        for decoding, past in zip(self._decoding, (0, _PROMPT), strict=True):
            length = decoding.batch.seq
            tokens = ids[:1, past : past + length]
            logits = decoding.run(tokens, np.ones_like(tokens), np.array([length - 1]), past)
            results[f"logits after {past}"] = logits.copy()
        return results


def _key(launch: Any) -> Key:
    bound = tuple(sorted((n, Bound(t.dtype, t.texture)) for n, t in launch.tensors.items()))
    return launch.path, tuple(sorted(launch.constants.items())), bound


def _near(wrong: np.ndarray, right: np.ndarray, rounding: float) -> bool:
    apart = np.abs(wrong.astype(np.float64) - right)
    return bool((apart <= rounding * (np.abs(right).max(initial=0.0) + 1e-30)).all())

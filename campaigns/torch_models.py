"""What PyTorch computes of a model and its adapter: logits, the loss, the adapter's gradient.

Needs torch, transformers and peft, which the project itself does not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoModelForCausalLM

from campaigns.drawn_models import Arrays, Result, Sample
from qlora_wgpu.config import LoraConfig

PREFIX = "base_model.model."


def as_stacks(model_type: str, tensors: Arrays) -> Arrays:
    """Weights as files of such models hold them: some have a layer's experts in one tensor."""
    names = _STACKS.get("granite" if model_type.startswith("granite") else model_type)
    if names is None:
        return tensors
    kept = {name: array for name, array in tensors.items() if ".experts." not in name}
    layers: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    for name in tensors.keys() - kept.keys():
        layer, _, rest = name.partition(names[0])
        expert, _, leaf = rest.partition(".")
        layers.setdefault(layer + names[1], {})[int(expert), leaf] = tensors[name]
    for at, parts in layers.items():
        count = max(expert for expert, _ in parts) + 1
        for end in ("weight", "bias")[: len({leaf for _, leaf in parts}) // 3]:
            both, down = (
                np.stack(
                    [np.stack([parts[i, f"{leaf}.{end}"] for leaf in leaves]) for i in range(count)]
                )
                for leaves in (("gate_proj", "up_proj"), ("down_proj",))
            )  # (experts, leaves, rows, ...)
            if model_type == "gpt_oss":
                both = np.moveaxis(both, 1, 2)
            whole = [stack.reshape(count, -1, *stack.shape[3:]) for stack in (both, down)]
            if model_type == "gpt_oss" and end == "weight":
                whole = [stack.swapaxes(1, 2) for stack in whole]
            for name, stack in zip(names[2:], whole, strict=True):
                ending = "_bias" if end == "bias" else ""
                kept[at + name + ending] = np.ascontiguousarray(stack)
    return kept


# What is before an expert's number and before the stacks' names, and these names.
_STACKS = {
    "granite": (
        "block_sparse_moe.experts.", "block_sparse_moe.", "input_linear.weight",
        "output_linear.weight",
    ),
    "gemma4_text": ("experts.", "experts.", "gate_up_proj", "down_proj"),
    "qwen3_5_moe_text": ("mlp.experts.", "mlp.experts.", "gate_up_proj", "down_proj"),
    "gpt_oss": ("mlp.experts.", "mlp.experts.", "gate_up_proj", "down_proj"),
}  # fmt: skip


class _Stack(torch.nn.Module):
    """A stack of experts' weights, each with a pair for each of its parts.

    Parts are one below the other, or (``in_turns``) side by side with their columns taking turns.
    """

    def __init__(self, pairs: list[list[tuple[Any, Any, float]]], in_turns: bool) -> None:
        super().__init__()
        self.pairs, self.in_turns = pairs, in_turns

    def forward(self, stack: torch.Tensor) -> torch.Tensor:
        experts = [
            [(a, b) if a is None else s * b @ a for a, b, s in parts] for parts in self.pairs
        ]
        if self.in_turns:
            own = [torch.stack(parts, 1).flatten(0, 1).T for parts in experts]
        else:
            own = [torch.cat(parts) for parts in experts]
        return stack + torch.stack(own)


class TorchModel:
    """A model by transformers, with an adapter by PEFT; experts' own pairs beside it."""

    def __init__(self, folder: Path, lora: LoraConfig, adapter: Arrays) -> None:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not report["unexpected_keys"] and not report["missing_keys"], report
        self.causal = model.eval()
        self.model_type = model.config.model_type
        experts = {n: a for n, a in adapter.items() if ".experts." in n}
        own = {n: a for n, a in adapter.items() if n not in experts}
        self.trained: dict[str, torch.Tensor] = {}
        self.model = model
        if own:
            self.model = self._with_peft(lora, own)
        self._with_experts(lora, experts)

    def _with_peft(self, lora: LoraConfig, adapter: Arrays) -> Any:
        pairs = (name for name in adapter if ".lora_" in name)
        names = {name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in pairs}
        names = {name for name in names if not name.endswith("magnitude_vector")}
        settings = PeftConfig(
            r=lora.r,
            lora_alpha=lora.lora_alpha,
            lora_dropout=0.0,
            target_modules=sorted(names),
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            rank_pattern=dict(lora.rank_pattern),
            alpha_pattern=dict(lora.alpha_pattern),
            modules_to_save=lora.modules_to_save,
            trainable_token_indices=lora.trainable_token_indices,
        )
        self.causal.config.model_type = "any"  # PEFT has stacks of experts beside names otherwise
        model = get_peft_model(self.causal, settings).eval()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                plain = name.replace(".modules_to_save.default", "").replace(".default", "")
                plain = plain.replace("_vector.weight", "_vector")
                self.trained[plain] = parameter
        assert self.trained.keys() == adapter.keys(), self.trained.keys() ^ adapter.keys()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(torch.from_numpy(adapter[name]))
        return model

    def _with_experts(self, lora: LoraConfig, adapter: Arrays) -> None:
        """Gives every expert's layers pairs of their own, which PEFT cannot."""
        if not adapter:
            return
        stacks = {n: m for n, m in self.causal.named_modules() if n.endswith(".experts")}
        for name, module in stacks.items():
            layer = name.partition(".layers.")[2].partition(".")[0]
            in_layer = {n: a for n, a in adapter.items() if f".layers.{layer}." in n}
            for stack, leaves in (
                ("gate_up_proj", ("gate_proj|w1", "up_proj|w3")),
                ("down_proj", ("down_proj|w2",)),
            ):
                count = getattr(module, stack).shape[0]
                pairs = [
                    [self._pair(in_layer, i, leaf, lora, getattr(module, stack)) for leaf in leaves]
                    for i in range(count)
                ]
                if any(a is not None for parts in pairs for a, _, _ in parts):
                    whole = [
                        [p if p[0] is not None else self._nothing(stack, module) for p in parts]
                        for parts in pairs
                    ]
                    register_parametrization(
                        module, stack, _Stack(whole, self.model_type == "gpt_oss"), unsafe=True
                    )

    def _pair(
        self, adapter: Arrays, expert: int, leaf: str, lora: LoraConfig, stack: torch.Tensor
    ) -> tuple[Any, Any, float]:
        for option in leaf.split("|"):
            ends = f".experts.{expert}.{option}.lora_A.weight"
            names = [name for name in adapter if name.endswith(ends)]
            if not names:
                continue
            assert len(names) == 1, names
            other = names[0].replace("lora_A", "lora_B")
            a, b = (
                torch.nn.Parameter(torch.from_numpy(adapter[n]).clone()) for n in (names[0], other)
            )
            self.trained[names[0]], self.trained[other] = a, b
            alpha = lora.alpha_pattern.get(option, lora.lora_alpha)
            rank = len(a)
            return a, b, alpha / (rank**0.5 if lora.use_rslora else rank)
        return None, None, 0.0

    def _nothing(self, stack: str, module: Any) -> tuple[Any, Any, float]:
        """A pair that changes nothing, where other parts of a stack have one."""
        shape = list(getattr(module, stack).shape[1:])
        rows, columns = shape[::-1] if self.model_type == "gpt_oss" else shape
        rows = rows // 2 if "up" in stack else rows
        return torch.zeros(1, columns), torch.zeros(rows, 1), 0.0

    def cast(self, dtype: torch.dtype) -> TorchModel:
        """Computes in this type from now on; buffers of rotations stay as they are read."""
        self.model.to(dtype)
        for parameter in self.trained.values():
            parameter.data = parameter.data.to(dtype)
        for module in self.causal.modules():
            if isinstance(module, _Stack):
                module.pairs = [
                    [(p[0], p[1], p[2]) if isinstance(p[0], torch.nn.Parameter)
                     else (p[0].to(dtype), p[1].to(dtype), p[2]) for p in parts]
                    for parts in module.pairs
                ]  # fmt: skip
        return self

    def nudged(self, share: float) -> TorchModel:
        """With weights changed at random by about a share of each."""
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
                weight.mul_(1 + share * noise)
        return self

    def logits_of(self, ids: np.ndarray, **keys: Any) -> Any:
        """The output for one text, as if no longer one had been read before."""
        for module in self.causal.modules():
            if hasattr(module, "original_inv_freq"):
                module.inv_freq.copy_(module.original_inv_freq)
                module.max_seq_len_cached = module.original_max_seq_len
        row = torch.from_numpy(np.ascontiguousarray(ids))[None]
        return self.model(input_ids=row, use_cache=False, **keys)

    def speaking(self, ids: np.ndarray, places: list[int]) -> np.ndarray:
        """Tokens, those at some places replaced in turn by what it finds the likeliest there."""
        ids = ids.copy()
        for at in sorted(places):
            with torch.no_grad():
                ids[at] = int(self.logits_of(ids[:at]).logits[0, -1].argmax())
        return ids

    def computed(self, samples: list[Sample], *, autocast: bool = False) -> Result:
        """Logits, loss and gradients; samples by themselves, as nothing joins them."""
        balanced = bool(getattr(self.causal.config, "output_router_logits", False))
        keys = {"output_router_logits": True} if balanced else {}
        for parameter in self.trained.values():
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = [self.logits_of(sample.ids, **keys) for sample in samples]
            total, count = 0.0, 0
            for sample, output in zip(samples, outputs, strict=True):
                targets = torch.from_numpy(sample.labels[1:].copy())
                count += int((targets != -100).sum())
                logits = output.logits[0, :-1]
                logits = logits if logits.dtype == torch.float64 else logits.float()
                if len(targets):
                    total = total + torch.nn.functional.cross_entropy(
                        logits, targets, ignore_index=-100, reduction="sum"
                    )
            loss = total / max(count, 1)
            if balanced and count and outputs[0].router_logits:
                loss = loss + self._balance(outputs).to(loss.dtype)
        if isinstance(loss, torch.Tensor) and loss.requires_grad and count:
            loss.backward()
        return Result(
            float(loss.detach()) if isinstance(loss, torch.Tensor) else loss,
            [output.logits[0].detach().double().numpy() for output in outputs],
            {
                name: np.zeros(tuple(p.shape)) if p.grad is None else p.grad.double().numpy().copy()
                for name, p in self.trained.items()
            },
        )

    def _balance(self, outputs: list[Any]) -> torch.Tensor:
        model = self.causal
        function = sys.modules[type(model).__module__].load_balancing_loss_func
        layers = zip(*(output.router_logits for output in outputs), strict=True)
        logits = tuple(torch.cat([each.flatten(0, -2) for each in layer]) for layer in layers)
        return model.router_aux_loss_coef * function(
            logits, model.num_experts, model.num_experts_per_tok
        )

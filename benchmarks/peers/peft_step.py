"""Times QLoRA steps of PEFT + bitsandbytes on torch; run by benchmarks/compare.py.

Needs a Python with torch, transformers and peft; NF4 needs bitsandbytes too. MODEL is a folder, or
a config.json whose weights are then random. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_base(args: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    """A model of random weights, made layer by layer as from_pretrained reads them.

    It never holds more than a layer that is not quantized, so that the most memory that is taken is
    a step's.
    """
    config = AutoConfig.from_pretrained(args.model)
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    for parent in list(base.model.modules()) if args.quant == "nf4" else ():
        for name, layer in list(parent.named_children()):
            if isinstance(layer, torch.nn.Linear):
                setattr(parent, name, random_nf4(layer, dtype, args.device))
    for module in base.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=args.device, recurse=False)
            for parameter in module.parameters(recurse=False):
                torch.nn.init.normal_(parameter, 0.0 if parameter.ndim > 1 else 1.0, 0.02)
    base.tie_weights()
    base.model.rotary_emb = type(base.model.rotary_emb)(config).to(args.device)
    left = [name for name, tensor in base.named_buffers() if tensor.is_meta]
    assert not left, f"{left} have no values"
    for parameter in base.parameters():
        parameter.requires_grad = False
    return base


def random_nf4(layer: torch.nn.Linear, dtype: torch.dtype, device: str) -> torch.nn.Module:
    import bitsandbytes

    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype,
        quant_type="nf4", device="meta",
    )  # fmt: skip
    weight = torch.empty(layer.weight.shape, dtype=dtype, device=device).normal_(0.0, 0.02)
    quantized.weight = bitsandbytes.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to(
        device
    )
    if layer.bias is not None:
        bias = torch.zeros(layer.out_features, dtype=dtype, device=device)
        quantized.bias = torch.nn.Parameter(bias)
    return quantized


def load(args: argparse.Namespace) -> torch.nn.Module:
    dtype = getattr(torch, args.compute)
    if args.model.endswith(".json"):
        return adapted(args, random_base(args, dtype))
    quantization = None
    if args.quant == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, quantization_config=quantization,
        device_map={"": args.device} if quantization else None, attn_implementation="sdpa",
    )  # fmt: skip
    if not quantization:
        base = base.to(args.device)
    return adapted(args, base)


def adapted(args: argparse.Namespace, base: torch.nn.Module) -> torch.nn.Module:
    if args.checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    if args.adapter:
        model = PeftModel.from_pretrained(base, args.adapter, is_trainable=True)
    else:
        model = get_peft_model(
            base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=MODULES)
        )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.train()


def versions() -> dict[str, str]:
    installed = {}
    for name in ("torch", "transformers", "peft", "bitsandbytes"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "none"
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--adapter")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--quant", choices=["nf4", "none"], default="nf4")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--json", help="file for what is printed")
    args = parser.parse_args()
    model = load(args)
    vocab = model.config.vocab_size
    ids = np.random.default_rng(1).integers(0, vocab, (args.batch, args.seq))
    ids = torch.from_numpy(ids).to(args.device)
    if args.device == "cuda":  # what loading took, and gave back, is none of a step's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    seconds, losses = [], []
    for _ in range(args.steps):
        begin = time.perf_counter()
        autocast = torch.autocast(args.device, torch.bfloat16, enabled=args.compute == "bfloat16")
        with autocast:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    result = {
        "seconds": seconds,
        "losses": losses,
        "tokens_per_step": args.batch * args.seq,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "versions": versions(),
    }
    if args.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
        result["device_mib"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

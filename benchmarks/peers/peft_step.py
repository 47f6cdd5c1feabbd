"""Times QLoRA steps of PEFT + bitsandbytes on torch; run by benchmarks/compare.py.

Needs a Python with torch, transformers, peft and bitsandbytes. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from importlib.metadata import version

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(args: argparse.Namespace) -> torch.nn.Module:
    dtype = getattr(torch, args.compute)
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
    args = parser.parse_args()
    model = load(args)
    vocab = model.config.vocab_size
    ids = np.random.default_rng(1).integers(0, vocab, (args.batch, args.seq))
    ids = torch.from_numpy(ids).to(args.device)
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
    names = ("torch", "transformers", "peft", "bitsandbytes")
    result = {
        "seconds": seconds,
        "losses": losses,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "versions": {name: version(name) for name in names},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

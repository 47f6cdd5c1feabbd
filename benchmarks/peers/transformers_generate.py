"""transformers' tokens a second with an adapter of PEFT: ``transformers_generate.py CONFIG.json``.

The base has random weights, in NF4 as bitsandbytes computes it or in floats. Needs a Python with
torch, transformers and peft; NF4 needs bitsandbytes too. Prints a JSON object for each batch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from peft_step import load, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1, help="of which the fastest counts")
    parser.add_argument("--quant", choices=["nf4", "none"], default="nf4")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--json", type=Path, help="file for what is printed, by batch")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vars(args).update(adapter=None, rank=8, checkpointing=False)
    model = load(args).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:  # the adapter's, which load makes float32 for training
            parameter.data = parameter.data.to(getattr(torch, args.compute))
    found = {}
    for batch in args.batch:
        rates = [measured(model, args, batch) for _ in range(args.repeats)]
        found[batch] = max(rates, key=lambda each: each["tokens_per_second"])
        print(json.dumps({**found[batch], "versions": versions()}), flush=True)
        if args.json:  # whole after each batch: it may be ended
            args.json.write_text(json.dumps(found) + "\n", encoding="utf-8")


def measured(model: torch.nn.Module, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Tokens a second after the prompt, and the processor's seconds of each."""
    ids = torch.arange(args.prompt).mul(37).remainder(model.config.vocab_size)
    ids = ids.repeat(batch, 1).to(args.device)

    def seconds(count: int) -> tuple[float, float]:
        """Seconds, and those of the processor, of so many tokens after the prompt."""
        wall, processor = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
            )  # fmt: skip
        assert made.shape[1] == args.prompt + count
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - processor

    seconds(2)
    first, longer = seconds(2), seconds(2 + args.tokens)
    tokens = args.tokens * batch
    return {
        "tokens_per_second": tokens / (longer[0] - first[0]),
        "cpu_seconds_per_token": (longer[1] - first[1]) / tokens,
    }


if __name__ == "__main__":
    main()

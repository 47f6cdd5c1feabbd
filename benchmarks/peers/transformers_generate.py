"""transformers' tokens a second with an adapter of PEFT: ``transformers_generate.py CONFIG.json``.

The base has random weights, in NF4 as bitsandbytes computes it or in floats. Needs a Python with
torch, transformers and peft; NF4 needs bitsandbytes too. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from peft_step import load, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quant", choices=["nf4", "none"], default="nf4")
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vars(args).update(adapter=None, rank=8, device="cpu", checkpointing=False)
    model = load(args).eval()
    ids = torch.arange(args.prompt).mul(37).remainder(model.config.vocab_size)
    ids = ids.repeat(args.batch, 1)

    def seconds(count: int) -> tuple[float, float]:
        """Seconds, and those of the processor, of so many tokens after the prompt."""
        wall, processor = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
            )  # fmt: skip
        assert made.shape[1] == args.prompt + count
        return time.perf_counter() - wall, time.process_time() - processor

    seconds(2)
    first, longer = seconds(2), seconds(2 + args.tokens)
    tokens = args.tokens * args.batch
    print(
        json.dumps(
            {
                "tokens_per_second": tokens / (longer[0] - first[0]),
                "cpu_seconds_per_token": (longer[1] - first[1]) / tokens,
                "versions": versions(),
            }
        )
    )


if __name__ == "__main__":
    main()

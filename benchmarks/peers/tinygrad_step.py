"""Times LoRA steps of a Llama written in tinygrad; run by benchmarks/compare.py.

Needs a Python with tinygrad, safetensors and, for DEV=WEBGPU, dawn-python. The base is float32.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.nn.optim import AdamW

LEAVES = {
    "q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp",
}  # fmt: skip


class Llama:
    """The forward pass of a tied Llama with LoRA on seven projections."""

    def __init__(self, folder: Path, adapter: Path, seq: int, scale: float) -> None:
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        self.weights = {name: Tensor(array.astype(np.float32)) for name, array in weights.items()}
        pairs = load_file(adapter / "adapter_model.safetensors")
        self.lora = {
            name.removeprefix("base_model.model."): Tensor(array).is_param_()
            for name, array in pairs.items()
        }
        self.scale = scale
        head = self.config["hidden_size"] // self.config["num_attention_heads"]
        angles = np.outer(
            np.arange(seq), self.config["rope_theta"] ** (-np.arange(0, head, 2) / head)
        )
        table = np.concatenate([angles, angles], -1).astype(np.float32)
        self.cos = Tensor(np.cos(table))
        self.sin = Tensor(np.sin(table))

    def linear(self, x: Tensor, layer: int, leaf: str) -> Tensor:
        name = f"model.layers.{layer}.{LEAVES[leaf]}.{leaf}"
        a, b = self.lora[f"{name}.lora_A.weight"], self.lora[f"{name}.lora_B.weight"]
        return x @ self.weights[f"{name}.weight"].T + self.scale * ((x @ a.T) @ b.T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * (mean + self.config["rms_norm_eps"]).rsqrt() * self.weights[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = Tensor.cat(-x[..., half:], x[..., :half], dim=-1)
        return x * self.cos + turned * self.sin

    def attention(self, x: Tensor, layer: int) -> Tensor:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        batch, seq, hidden = x.shape

        def split(leaf: str, count: int) -> Tensor:
            y = self.linear(x, layer, leaf).reshape(batch, seq, count, hidden // heads)
            return y.transpose(1, 2)

        q, k = self.rotate(split("q_proj", heads)), self.rotate(split("k_proj", kv))
        v = split("v_proj", kv)
        k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
        o = q.scaled_dot_product_attention(k, v, is_causal=True)
        return self.linear(o.transpose(1, 2).reshape(batch, seq, hidden), layer, "o_proj")

    def loss(self, ids: Tensor) -> Tensor:
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{at}.input_layernorm"), layer)
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gated = self.linear(y, layer, "gate_proj").silu() * self.linear(y, layer, "up_proj")
            x = x + self.linear(gated, layer, "down_proj")
        logits = self.norm(x, "model.norm")[:, :-1] @ embedding.T
        return logits.sparse_categorical_crossentropy(ids[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    model = Llama(args.model, args.adapter, args.seq, 2.0)
    vocab = model.config["vocab_size"]
    drawn = np.random.default_rng(1).integers(0, vocab, (args.batch, args.seq))
    ids = Tensor(drawn.astype(np.int32)).realize()
    optimizer = AdamW(list(model.lora.values()), lr=2e-4, weight_decay=0.0)

    @TinyJit
    def step() -> Tensor:
        loss = model.loss(ids)
        gradients = loss.gradient(*optimizer.params)
        norm = sum((g.square().sum() for g in gradients), Tensor(0.0)).sqrt()
        factor = (1.0 / (norm + 1e-6)).minimum(1.0)
        for parameter, gradient in zip(optimizer.params, gradients, strict=True):
            parameter.grad = gradient * factor
        # Together: alone, the loss would be computed from the updated adapter.
        Tensor.realize(loss, *optimizer.schedule_step())
        return loss

    seconds, losses = [], []
    with Context(TRAINING=1):
        for _ in range(args.steps):
            begin = time.perf_counter()
            losses.append(float(step().item()))
            seconds.append(time.perf_counter() - begin)
    result = {
        "seconds": seconds,
        "losses": losses,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "versions": {"tinygrad": version("tinygrad"), "device": Device.DEFAULT},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    assert os.environ.get("DEV"), "choose tinygrad's device with DEV=WEBGPU or DEV=CPU"
    main()

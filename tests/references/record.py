"""Records what PyTorch computes for small models of every family.

usage: python tests/references/record.py [case ...]

Needs torch, transformers and peft, and bitsandbytes for cases that end in -nf4, none of which the
project itself needs; tests/references/README has the versions. Writes CASE.npz beside this file:
the config.json, tensor shapes, logits, every LoRA gradient, and ten losses of AdamW.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from case_parts import ODD
from cases import CASES
from peft import LoraConfig, get_peft_model
from safetensors.numpy import save_file
from safetensors.torch import load_file
from seeded import adapter, batch, marks, norm_offset, samples, weights
from torch.nn.utils.parametrize import register_parametrization
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
STEPS, RATE, R, ALPHA, SHOWN = 10, 5e-3, 5, 10, 40
# Linear layers in 4 bits, of ranks and sizes with which q, k, v and gate, up are one product.
NF4, NF4_R, BLOCK = "-nf4", 8, 64
# How experts' files call what PyTorch keeps as two stacks: gate and up, and down.
USUAL = ("mlp", "gate_proj", "up_proj", "down_proj")
EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "lfm2_moe": ("feed_forward", "w1", "w3", "w2"),
    "granitemoe": ("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
    "granitemoeshared": ("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
    "granitemoehybrid": ("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
    "granitemoe_swa": ("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
    "gemma4_text": ("", "gate_proj", "up_proj", "down_proj"),
    "nemotron_h": ("mixer", "", "up_proj", "down_proj"),  # without a gate
}
# Models with images that have no text part by itself: a small tower, which is not recorded.
TOWERS = {
    "muse_glimmer": {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4,
    },
}  # fmt: skip
TEXT_MODULES = ("model.language_model.", "lm_head.")


def rank(case):
    return NF4_R if case.endswith(NF4) else R


def dequantized(array):
    """What bitsandbytes' bits of a matrix stand for.

    By its code books, since its own dequantization on CPUs is wrong where rows are no whole blocks.
    """
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        torch.from_numpy(array), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    nested, count = state.state2, state.absmax.numel()
    scales = nested.absmax.repeat_interleave(nested.blocksize)[:count]
    absmax = nested.code[state.absmax.long()] * scales + state.offset
    pairs = packed.numpy().ravel()
    codes = np.stack([pairs >> 4, pairs & 15], 1).ravel()[: array.size]
    values = state.code.numpy()[codes] * np.repeat(absmax.numpy(), BLOCK)[: array.size]
    return values.reshape(array.shape).astype(np.float32)


def tensors(case, shapes, offset):
    """The weights of a case, by name."""
    made = weights(shapes, offset)
    if case.endswith(NF4):
        made |= {n: dequantized(a) for n, a in made.items() if n.endswith("_proj.weight")}
    return made


def make(case):
    model_type, changes = CASES[case]
    keys, auto = {**ODD, **changes}, AutoModelForCausalLM
    if model_type in TOWERS:
        keys = {"text_config": keys, "vision_config": TOWERS[model_type]}
        auto = AutoModelForImageTextToText
    config = AutoConfig.for_model(model_type, **keys)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with tempfile.TemporaryDirectory() as folder:  # what the files of such a model hold
        model.save_pretrained(folder)
        shapes = {n: list(t.shape) for n, t in load_file(f"{folder}/model.safetensors").items()}
        saved = json.loads(Path(folder, "config.json").read_text())
    if model_type in TOWERS:
        shapes = {n: shape for n, shape in shapes.items() if n.startswith(TEXT_MODULES)}
    offset = norm_offset(model_type)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(tensors(case, shapes, offset), f"{folder}/model.safetensors", {"format": "pt"})
        model, report = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    missing = report["missing_keys"]
    if model_type in TOWERS:
        missing = [name for name in missing if name.startswith(TEXT_MODULES)]
    assert not report["unexpected_keys"] and not missing, report
    # Gradients of float32 differ from those of float64 by up to 1.5e-5 here.
    return model.eval().double(), saved, shapes, offset


def targets(model):
    names = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    if model.config.model_type in TOWERS:
        return [n for n in names if n.startswith(TEXT_MODULES[0])]
    # Routers that are linear layers (Gemma 4, Hunyuan, Trinity) stay frozen.
    frozen = {"out_proj"} if model.config.model_type in ("falcon_h1", "nemotron_h") else set()
    frozen |= {"lm_head", "proj", "wg", "gate"}
    terms = {n for n in names if "_adapter_list." in n}  # of Zamba 2, in each copy of a block
    whole = {n for n in names - terms if n.rsplit(".", 1)[-1].isdigit()}  # layers are numbers, too
    leaves = {n.rsplit(".", 1)[-1] for n in names - terms - whole} - frozen
    return sorted(leaves | whole) + used_terms(model, terms)


def used_terms(model, terms):
    """Those that the layer with this copy of the block uses."""
    if not terms:
        return []
    uses = {layer: str(use) for use, layer in enumerate(model.config.hybrid_layer_ids)}
    return sorted(n for n in terms if n.split(".")[-2] == uses[int(n.split(".")[2])])


def peft_name(name):
    return name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")


class Adapted(torch.nn.Module):
    """A stack of experts' weights, each with an adapter for each of its parts.

    Parts are one below the other, or side by side with their columns taking turns.
    """

    def __init__(self, pairs, in_turns):
        super().__init__()
        self.pairs = [pair for expert in pairs for pair in expert]
        self.parts, self.in_turns = len(pairs[0]), in_turns

    def forward(self, stack):
        products = [ALPHA / R * b @ a for a, b in self.pairs]
        experts = [products[i : i + self.parts] for i in range(0, len(products), self.parts)]
        if self.in_turns:
            return stack + torch.stack([torch.stack(e, 1).flatten(0, 1).T for e in experts])
        return stack + torch.stack([torch.cat(e) for e in experts])


def adapted_experts(model, model_type, dtype):
    """Gives every expert's layers adapters of their own, which PEFT cannot; by PEFT's names."""
    at, gate, up, down = EXPERTS.get(model_type, USUAL)
    trained = {}
    for name, module in list(model.named_modules()):
        if not name.endswith(".experts"):
            continue
        layer = name.rsplit(".", 2 if at else 1)[0]
        wide = ("gate_up_proj", (gate, up)) if gate else ("up_proj", (up,))
        for stack, leaves in (wide, ("down_proj", (down,))):
            count, out, inner = getattr(module, stack).shape
            in_turns = model_type == "gpt_oss"
            if in_turns:
                out, inner = inner, out
            pairs = []
            for expert in range(count):
                pairs.append([])
                for leaf in leaves:
                    a = torch.nn.Parameter(torch.zeros(R, inner, dtype=dtype))
                    b = torch.nn.Parameter(torch.zeros(out // len(leaves), R, dtype=dtype))
                    parts = (layer, at, "experts", str(expert), leaf)
                    full = ".".join(part for part in parts if part)
                    trained[f"{full}.lora_A.weight"] = a
                    trained[f"{full}.lora_B.weight"] = b
                    pairs[-1].append((a, b))
            register_parametrization(module, stack, Adapted(pairs, in_turns))
    return trained


def adapted(case, dtype):
    """The model with its seeded adapter, and what of it is trained."""
    model = make(case)[0].to(dtype)
    lora = LoraConfig(
        r=rank(case), lora_alpha=ALPHA, lora_dropout=0.0, target_modules=targets(model),
        use_dora=case.endswith("-dora"),
    )  # fmt: skip
    model.config.model_type = "any"  # PEFT would take "gate_proj" for the stacks of experts, too
    model = get_peft_model(model, lora).to(dtype).eval()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if case.endswith("-experts"):
        trained |= adapted_experts(model, CASES[case][0], dtype)
    start = adapter({peft_name(n): list(p.shape) for n, p in trained.items()})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(torch.from_numpy(start[peft_name(name)]))
    return model, trained


def by_length(case):
    """Whether a sample's length changes how it is rotated."""
    parameters = CASES[case][1].get("rope_parameters", {})
    kinds = ("dynamic", "longrope")
    return parameters.get("rope_type") in kinds and "alpha" not in parameters


def afresh(model):
    """Forgets the frequencies of longer samples, which dynamic RoPE goes on with."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.inv_freq.copy_(module.original_inv_freq)
            module.max_seq_len_cached = module.original_max_seq_len
    return model


def alone(model, ids, labels):
    """The mean loss over the labels of samples, each by itself."""
    counts = [int((row[1:] != -100).sum()) for row in labels]
    total = 0.0
    for row, targets, count in zip(ids, labels, counts, strict=True):
        if count:
            total += count * afresh(model)(input_ids=row[None], labels=targets[None]).loss
    return total / sum(counts)


def gradients_of(trained, prefix):
    return {
        f"{prefix}:{peft_name(name)}": parameter.grad.float().numpy().copy()
        for name, parameter in trained.items()
    }


def packed(case):
    """Logits of samples alone, and the loss and the gradients of all of them together."""
    model, trained = adapted(case, torch.float64)
    ids = [torch.from_numpy(sample) for sample in samples()]
    with torch.no_grad():
        logits = [afresh(model)(input_ids=row[None]).logits[0, :, :SHOWN] for row in ids]
    loss = alone(model, ids, ids)
    loss.backward()
    return {
        "packed_logits": torch.cat(logits).float().numpy(), "packed_loss": loss.item(),
        **gradients_of(trained, "packed_grad"),
    }  # fmt: skip


def text(case, count=9):
    """A text that grows past 16 tokens by what is likeliest after it, each time read anew."""
    model = adapted(case, torch.float64)[0]
    ids = start = torch.from_numpy(samples((12,))[0])[None]
    rows = []
    with torch.no_grad():
        for _ in range(count):
            rows.append(afresh(model)(input_ids=ids, use_cache=False).logits[0, -1])
            ids = torch.cat([ids, rows[-1].argmax()[None, None]], 1)
        if case.startswith("phi3"):  # which reads a text anew where it becomes long
            generated = afresh(model).generate(input_ids=start, max_new_tokens=count)
            assert torch.equal(generated, ids), (generated, ids)
    return {"text": ids[0].numpy(), "text_logits": torch.stack(rows)[:, :SHOWN].float().numpy()}


def loss_of(case, model, ids, mask, labels):
    """The loss of a batch; of rows by themselves where the longest would change the others."""
    if not by_length(case):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss
    rows = list(zip(ids, mask, labels, strict=True))
    return alone(model, [i[m == 1] for i, m, _ in rows], [t[m == 1] for _, m, t in rows])


def train(case, dtype):
    """Ten losses, and the gradients of the first step."""
    inputs = [torch.from_numpy(a) for a in batch()]
    model, trained = adapted(case, dtype)
    optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = loss_of(case, model, *inputs)
        loss.backward()
        if step == 0:
            gradients = gradients_of(trained, "grad")
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses), gradients


def record(case):
    model, config, shapes, offset = make(case)
    ids, mask, _ = (torch.from_numpy(a) for a in batch())
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
        if by_length(case):
            for row, seen in zip(range(len(ids)), mask == 1, strict=True):
                logits[row, seen] = afresh(model)(input_ids=ids[row, seen][None]).logits[0]
    losses, gradients = train(case, torch.float64)
    if by_length(case):
        gradients |= {**packed(case), **text(case)}
    recorded = {
        "config": json.dumps(config), "shapes": json.dumps(shapes), "norm_offset": offset,
        "logits": logits[..., :SHOWN].float().numpy(), "lse": torch.logsumexp(logits, -1).numpy(),
        "losses": losses, "losses_float32": train(case, torch.float32)[0], **gradients,
    }  # fmt: skip
    if case.endswith(NF4):
        known = tensors(case, shapes, offset)
        recorded |= {f"nf4:{n}": marks(a) for n, a in known.items() if n.endswith("_proj.weight")}
    file = HERE / f"{case}.npz"
    np.savez_compressed(file, **recorded)
    print(f"{case}: {len(gradients)} gradients, {file.stat().st_size // 1024} KiB, {losses[:2]}")


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        record(case)

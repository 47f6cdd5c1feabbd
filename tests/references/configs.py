"""Reads config.json files as transformers does, and compares: every key, other values.

usage: python tests/references/configs.py [--count N] [--seed S] [--record FILE] [MODEL_TYPE ...]

Each trial is a small config.json of a family with one key changed (or, with --count, with a few at
random). transformers makes a float64 model of it with seeded weights; ``numpy_model`` computes what
our family composes. Logits must agree, or one of the two must refuse. --odd N tries so many of the
campaign of odd models instead (``campaigns/drawn_oddities.py``). Needs torch and transformers
besides this project. --record writes trials that agree and tell something to FILE: the tests have
them in tests/families/config_keys.npz.
"""

import argparse
import json
import random as plain_random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from campaigns.drawn_oddities import odd_config  # noqa: E402
from qlora_wgpu.errors import UnsupportedModelError  # noqa: E402
from qlora_wgpu.families.family import find_family, known_families  # noqa: E402
from references import numpy_model  # noqa: E402
from references.config_trials import (  # noqa: E402
    GRANITES,
    RENAMED,
    TEXTS,
    TOWERS,
    changed,
    several,
    singles,
)
from references.seeded import norm_offset, samples, weights  # noqa: E402

SHOWN = 12
SHOWN_OUTCOMES = ("WRONG", "FAULT", "refused there", "refused here")
TOWERS_MODULES = tuple(
    f"model.{name}"
    for name in ("vision", "visual", "connector", "multi_modal_projector", "image_newline")
)
# Keys that some families honour and others ignore.
TELLING = {
    "partial_rotary_factor", "attn_logit_softcapping", "sliding_window", "layer_types",
    "use_sliding_window", "original_max_position_embeddings", "sliding_window_pattern",
    "_sliding_window_pattern", "rope_local_base_freq",
}  # fmt: skip


def theirs(config, ids):
    """transformers' logits, their weights, and the row of padding; an Exception where it fails."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    texts = "", "gate_proj", "up_proj", "down_proj"
    stacked = {
        "mixtral": ("block_sparse_moe.", "w1", "w3", "w2"),
        "lfm2_moe": ("feed_forward.", "w1", "w3", "w2"),
        "nemotron_h": ("mixer.", "", "up_proj", "down_proj"),
        "gemma4_text": texts,
        "gemma4": texts,
        **dict.fromkeys(
            (*GRANITES, "granitemoe_swa"),
            ("block_sparse_moe.", "gate_proj", "up_proj", "down_proj"),
        ),
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(config))
            read = AutoConfig.from_pretrained(folder)
        has_tower = config["model_type"] in TOWERS
        if config["model_type"] in TEXTS and not has_tower:
            read = read.get_text_config()
        auto = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
        model = auto.from_config(
            read, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
        )
        model = model.to(torch.float64).eval()
        arrays, offset = {}, norm_offset(config["model_type"])
        unread = TOWERS_MODULES
        if getattr(read.get_text_config(), "altup_correct_scale", True) is False:
            unread += tuple(n for n in model.state_dict() if n.endswith("correct_output_scale"))
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        frozen = (".act_fn.", "layer_scalar", "expert_bias", "e_score_correction_bias")
        stored = (part for part in model.named_buffers() if any(n in part[0] for n in frozen))
        for name, parameter in [*model.named_parameters(), *stored]:
            if (tied and name == "lm_head.weight") or name.startswith(unread):
                continue
            if ".experts." in name:
                usual = ("mlp.", "gate_proj", "up_proj", "down_proj")
                at, gate, up, down = stacked.get(config["model_type"], usual)
                in_turns = config["model_type"] == "gpt_oss"  # and transposed
                shape = (
                    parameter.shape[:1] + parameter.shape[:0:-1] if in_turns else parameter.shape
                )
                count, rows, *columns = shape
                wide = (gate, up) if gate else (up,)
                leaves = (down,) if "down" in name else wide
                is_renamed = config["model_type"] in RENAMED
                file = name.replace("model.", "model.language_model.", 1) if is_renamed else name
                prefix = file.rsplit(".", 3 if at else 2)[0] + f".{at}experts."
                kind = "bias" if name.endswith("_bias") else "weight"
                own = weights({
                    f"{prefix}{i}.{leaf}.{kind}": (rows // len(leaves), *columns)
                    for i in range(count) for leaf in leaves
                }, offset)  # fmt: skip
                parts = np.stack(list(own.values())).reshape(count, len(leaves), -1, *columns)
                if in_turns:
                    stack = np.moveaxis(parts, 1, 2).reshape(shape).swapaxes(1, -1)
                else:
                    stack = parts.reshape(shape)
            else:
                file = name
                if config["model_type"] == "mixtral" and ".mlp.gate" in name:
                    file = name.replace(".mlp.", ".block_sparse_moe.")
                file = file.replace(".gate.moe_statics.", ".moe_statics.")
                if config["model_type"] == "olmo_hybrid" and ".conv1d." in name:
                    mixer = model.get_submodule(name.removesuffix(".conv1d.weight"))
                    sizes = {"q": mixer.key_dim, "k": mixer.key_dim, "v": mixer.value_dim}
                    files = {name.replace(".conv1d", f".{n}_conv1d"): s for n, s in sizes.items()}
                    own = weights({n: (s, *parameter.shape[1:]) for n, s in files.items()}, offset)
                    arrays |= own
                    with torch.no_grad():
                        parameter.copy_(torch.from_numpy(np.concatenate([*own.values()])))
                    continue
                if config["model_type"] == "exaone_moe":
                    file = file.replace(".gate.e_score", ".e_score")
                if config["model_type"] in GRANITES:
                    file = file.replace(".router.weight", ".router.layer.weight")
                if config["model_type"] in RENAMED:
                    file = name.replace("model.", "model.language_model.", 1)
                own = weights({file: tuple(parameter.shape)}, offset)
                stack = own[file]
            arrays |= own
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(stack))
        with torch.no_grad():
            output = model(input_ids=torch.from_numpy(ids)[None], use_cache=False, return_dict=True)
        padding = model.get_input_embeddings().padding_idx
        return output.logits[0].double().numpy(), arrays, padding
    except Exception as err:
        return err, {}, None


def ours(config, arrays, ids):
    """Our logits; an UnsupportedModelError where we refuse, any other Exception is a fault."""
    try:
        architecture = find_family(config).read(config)
        if arrays:
            shapes = {name: tuple(shape) for name, shape in numpy_model.names(architecture).items()}
            held = {name: array.shape for name, array in arrays.items()}
            if shapes != held:  # which loading says
                return UnsupportedModelError(
                    f"the files hold other tensors: {shapes.items() ^ held.items()}"
                )
            return numpy_model.logits(config, arrays, ids)
    except Exception as err:
        return err
    return None


def outcome(config, ids):
    """What became of a trial, why, and transformers' logits if there are any."""
    expected, arrays, padding = theirs(config, ids)
    got = ours(config, arrays, ids)
    if isinstance(got, UnsupportedModelError):
        both = isinstance(expected, Exception)
        return ("both refuse" if both else "refused here"), str(got), expected
    if isinstance(got, Exception):
        return "FAULT", repr(got), expected
    if isinstance(expected, Exception):
        return "refused there", f"{type(expected).__name__}: {expected}", expected
    if not np.isfinite(expected).all():
        return "not finite", "", expected
    if (row := find_family(config).read(config).padding_idx) != padding:
        return "WRONG", f"the row of padding is {padding}, not {row}", expected
    apart = np.abs(got - expected).max() / np.abs(expected).max()
    return ("agree" if apart <= 1e-5 else "WRONG"), f"{apart:.1e}", expected


def odd(model_type, number, seed):
    """A drawn config.json and some tokens; few, as rounding of angles grows with their number."""
    draw = plain_random.Random(f"{seed} {number} {model_type}")
    config = odd_config(draw, model_type)
    length = draw.choice((1, 2, 19, 37))
    return config, np.random.default_rng(number).integers(0, config["vocab_size"], length)


def note(recorded, model_type, changes, logits):
    """Keeps a trial that differs from all with the same keys, or where a key is to be ignored."""
    keys = set(changes)
    before = [
        kept
        for (m, text), kept in recorded.items()
        if m == model_type and (set(json.loads(text)) == keys or text == "{}")
    ]
    if keys & TELLING or not any(np.allclose(kept, logits, 1e-5, 1e-6) for kept in before):
        recorded[model_type, json.dumps(changes)] = logits


def kept(file, model_types):
    """Recorded trials of the types that are not asked for."""
    if not model_types or not Path(file).exists():
        return {}
    before = np.load(file)
    trials = zip(json.loads(str(before["trials"])), before["logits"], strict=True)
    return {(m, json.dumps(c)): row for (m, c), row in trials if m not in model_types}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--odd", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    ids = samples((20,))[0]
    random = np.random.default_rng(options.seed)
    table, recorded = Counter(), {}
    for model_type in options.model_types or sorted(known_families()):
        trials = [{}, *singles(model_type), *several(model_type, options.count, random)]
        for changes in [] if options.odd else trials:
            config = changed(model_type, changes)
            what, why, expected = outcome(config, ids)
            table[model_type, what] += 1
            if what in SHOWN_OUTCOMES:
                print(f"{what:14} {model_type:12} {json.dumps(changes)}  {why[:170]}", flush=True)
            if what == "agree":
                note(recorded, model_type, changes, expected[-1, :SHOWN].astype(np.float32))
        for number in range(options.odd if model_type not in TEXTS else 0):
            config, drawn = odd(model_type, number, options.seed)
            what, why, _ = outcome(config, drawn)
            table[model_type, what] += 1
            if what in SHOWN_OUTCOMES:
                print(f"{what:14} {json.dumps(config)}  {why[:170]}", flush=True)
    if options.record:
        recorded = kept(options.record, options.model_types) | recorded
        trials = json.dumps([[m, json.loads(changes)] for m, changes in recorded])
        np.savez_compressed(options.record, trials=trials, logits=np.stack([*recorded.values()]))
    kinds = sorted({what for _, what in table})
    print("model_type".ljust(14), *(kind.rjust(14) for kind in kinds))
    for model_type in dict.fromkeys(m for m, _ in table):
        print(model_type.ljust(14), *(str(table[model_type, kind]).rjust(14) for kind in kinds))
    wrong = sum(count for (_, what), count in table.items() if what.isupper())
    print(f"{sum(table.values())} trials, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

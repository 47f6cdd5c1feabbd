"""Whether llama.cpp computes the same of an exported file, and cuts texts the same.

usage: python tests/references/gguf_models.py LIBRARY [MODEL_TYPE ...]

LIBRARY is llama.cpp's, see ``llama_cpp.py``. Random models with adapters for all layers are
exported in several types; logits of base and adapter here, of the file read back here and of
llama.cpp are compared. Then the tokenizers of ``support.recorded`` are, on odd texts. README.md has
the figures.
"""

import json
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from checkpoint.test_gguf_tokenizer import odd_texts
from e2e.tiny import write_weights
from support.gguf_files import random_weights
from support.gguf_models import CHANGES, CONFIGS, adapter_of
from support.recorded import RECORDED

from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.families.family import find_family
from qlora_wgpu.gguf.architectures import BY_MODEL_TYPE as ARCHITECTURES
from qlora_wgpu.runs.exporting import export_adapter, export_model
from references.llama_cpp import LlamaCpp

WHOLE = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 6,
         "sliding_window": None, "vocab_size": 49_152}  # fmt: skip
TYPES = ("f32", "f16", "q8_0", "q4_0")


def base(place, config, tokenizer="smollm"):
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config))
    write_weights(place, {n: np.asarray(a * _scale(n)) for n, a in random_weights(config).items()})
    for path in (RECORDED / "tokenizers" / tokenizer).glob("*token*.json"):
        shutil.copy(path, place / path.name)


def _scale(name):
    """Smaller than they are drawn, so that attention looks at more than one token."""
    return 1.0 if "norm" in name or "embed" in name else 0.3


def logits(path, ids, adapter=None):
    plain = QuantConfig(scheme="none")
    with QLoRAModel.from_pretrained(
        path, quant=plain, compute_dtype="float32", adapter=adapter
    ) as model:
        return model.logits(ids[None])[0]


def relative(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def compare_logits(library, case, place):
    model_type, case = case.split()[0], case
    config = CONFIGS[model_type] | WHOLE | CHANGES[case]
    if config.get("head_dim"):
        square = ARCHITECTURES[model_type].is_square
        config["head_dim"] = 16 if square or model_type == "exaone4" else 32
    if "kv_lora_rank" in config:
        config |= {"num_key_value_heads": 6, "head_dim": 8, "kv_lora_rank": 64,
                   "qk_nope_head_dim": 32, "v_head_dim": 32}  # fmt: skip
    if "mamba_d_head" in config:
        config["mamba_d_head"] = 32
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = 32
    windows = ARCHITECTURES[model_type].windows
    if windows in ("periodic", "every other", "listed") or "windows" in case or "gemma4" in case:
        config["sliding_window"] = 7
    base(place, config)
    adapter_of(place, config)
    _scale_adapter(place / "adapter", 0.15, 0.15)
    ids = np.random.default_rng(0).integers(5, config["vocab_size"], 24)
    ours = logits(place, ids, place / "adapter")
    print(f"{case}: largest logit {np.abs(ours).max():.1f}", flush=True)
    for name in TYPES:
        path = place / f"{name}.gguf"
        export_model(str(place), str(place / "adapter"), path, type_name=name)
        back = logits(path, ids)
        model = library.open(path)
        theirs = model.logits(ids)
        model.close()
        print(
            f"  {name}: read back {relative(back, ours):.1e} from base and adapter, llama.cpp "
            f"{relative(theirs, ours):.1e}; llama.cpp from read back {relative(theirs, back):.1e}",
            flush=True,
        )
    unadapted = ARCHITECTURES[model_type].unadapted
    if unadapted:  # which llama.cpp leaves out of adapters
        linears = find_family(config).read(config).every_linear
        leaves = {spec.name.rpartition(".")[2] for spec in linears} - set(unadapted)
        adapter_of(place, config, tuple(leaves))
        _scale_adapter(place / "adapter", 0.15, 0.15)
        ours = logits(place, ids, place / "adapter")
    export_adapter(str(place), str(place / "adapter"), place / "adapter.gguf")
    (place / "none").mkdir()
    # The base alone: an adapter that does nothing.
    adapter_of(place / "none", config)
    _scale_adapter(place / "none/adapter", 1.0, 0.0)
    export_model(str(place), str(place / "none/adapter"), place / "base.gguf", type_name="f32")
    model = library.open(place / "base.gguf")
    theirs = model.logits(ids, place / "adapter.gguf")
    model.close()
    print(f"  adapter.gguf on the base in f32: {relative(theirs, ours):.1e}")


def _scale_adapter(folder, a, b):
    from safetensors.numpy import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({n: array * (a if "lora_A" in n else b) for n, array in tensors.items()}, path)


def compare_tokens(library, name, place):
    size = Tokenizer.from_folder(RECORDED / "tokenizers" / name).vocab_size
    config = CONFIGS["llama"] | {"vocab_size": size + 3, "hidden_size": 8, "intermediate_size": 8,
                                 "num_attention_heads": 1, "num_key_value_heads": 1,
                                 "head_dim": 8}  # fmt: skip
    base(place, config, name)
    adapter_of(place, config)
    export_model(str(place), str(place / "adapter"), place / "m.gguf", type_name="f16")
    tokenizer, model = Tokenizer.from_folder(place), library.open(place / "m.gguf")
    texts = [t for t in odd_texts(400) if "</s>" not in t]
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    for what, chosen in (("as they are", texts), ("in NFC", composed)):
        wrong = sum(model.encode(t) != tokenizer.encode(t) for t in chosen)
        print(f"{name}: ids of {wrong} of {len(chosen)} odd texts differ, {what}", flush=True)
    model.close()


def main(library, *model_types):
    library = LlamaCpp(library)
    with tempfile.TemporaryDirectory() as place:
        for case in model_types or CHANGES:
            compare_logits(library, case, Path(place) / case.replace(" ", "-"))
        for name in ("smollm", "qwen3", "tinyllama") if not model_types else ():
            compare_tokens(library, name, Path(place) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Whether the ids that ``LlamaCppTokenizer`` makes are llama.cpp's own.

usage: python tests/references/gguf_tokens.py LIBRARY [NAME ...]

LIBRARY is llama.cpp's, see ``llama_cpp.py``. Tokenizers are written into GGUF files, of which both
make ids: of odd texts and of chats, with special tokens, spaces around them and nothing between
them. README.md has the figures.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tokenizers
from checkpoint.test_gguf_tokenizer import odd_texts
from e2e.tiny import write_weights
from support.gguf_files import random_weights
from support.gguf_models import CONFIGS, adapter_of
from support.recorded import RECORDED
from support.tiny_tokenizer import write_folder

from qlora_wgpu.checkpoint.gguf_file import GGUFFile
from qlora_wgpu.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.data.gguf_vocabulary import LlamaCppTokenizer
from qlora_wgpu.runs.exporting import export_model
from references.llama_cpp import LlamaCpp

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
EXPRESSIONS = ("gpt-2", "llama-bpe", "qwen35", "gpt-4o", "tekken", "deepseek-v3", "seed-coder")


def recorded(name):
    def write(place):
        for path in (RECORDED / "tokenizers" / name).glob("*token*.json"):
            (place / path.name).write_bytes(path.read_bytes())

    return write


def tiny(place):
    write_folder(place, {"eos_token": "</s>", "bos_token": "<s>"}, merges=(("t", "h"),))
    change(place, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False,
                                 "use_regex": True, "trim_offsets": True})  # fmt: skip


def pieces(scheme):
    """SentencePiece's way, with a token for each byte."""

    def write(place):
        special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
            prepend_scheme=scheme, split=False
        )
        first = [*special, *(f"<0x{i:02X}>" for i in range(256))]
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=900, special_tokens=first, show_progress=False
        )
        backend.train_from_iterator([t for t in odd_texts(0) if t.isascii()], trainer)
        stored = json.loads(backend.to_str())
        stored["added_tokens"] = [t for t in stored["added_tokens"] if t["content"] in special]
        (place / "tokenizer.json").write_text(json.dumps(stored))
        config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
        (place / "tokenizer_config.json").write_text(json.dumps(config))

    return write


def cut(pre):
    def write(place):
        recorded("qwen3")(place)
        known = PRE_TOKENIZERS[pre]
        change(place, pre_tokenizer=known.pre_tokenizer, normalizer=known.normalizer)
        stored = json.loads((place / "tokenizer.json").read_text())
        stored["model"]["ignore_merges"] = known.ignore_merges
        (place / "tokenizer.json").write_text(json.dumps(stored))

    return write


def change(place, **parts):
    path = place / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


def around_special_tokens(tokenizer, texts):
    """Texts with the tokenizer's own special tokens in them."""
    added = tokenizer._backend.get_added_tokens_decoder().values()
    special = [token.content for token in added][:12]
    made = []
    for i, text in enumerate(texts):
        begin, end = special[i % len(special)], special[(i * 7 + 1) % len(special)]
        space = ("", " ", "\n", "  ")[i % 4]
        made += [f"{begin}{space}user\n{text}{space}{end}{begin}", f"{text}{end}{end}{space}{text}"]
    return made


def compare(library, name, write, place):
    place.mkdir()
    write(place)
    tokenizer = Tokenizer.from_folder(place)
    config = CONFIGS["llama"] | SIZES | {"vocab_size": tokenizer.vocab_size + 3}
    (place / "config.json").write_text(json.dumps(config))
    write_weights(place, random_weights(config))
    adapter_of(place, config)
    path = place / "m.gguf"
    export_model(str(place), str(place / "adapter"), path, type_name="f16")
    ours = LlamaCppTokenizer(GGUFFile(path).metadata, path)
    model = library.open(path)
    texts = odd_texts(400)
    bos = tokenizer.bos_token or ""
    figures = []
    for chosen in (texts, around_special_tokens(tokenizer, texts)):
        chosen = [t for t in chosen if not (bos and t.startswith(bos))]
        theirs = [model.encode(text) for text in chosen]
        emulated = sum(ours.encode(t) != ids for t, ids in zip(chosen, theirs, strict=True))
        trained = sum(tokenizer.encode(t) != ids for t, ids in zip(chosen, theirs, strict=True))
        figures.append(f"{emulated} and {trained} of {len(chosen)}")
    model.close()
    print(f"{name}: emulation and tokenizer.json differ from llama.cpp in {figures[0]} odd texts, "
          f"{figures[1]} with special tokens", flush=True)  # fmt: skip


def main(library, *names):
    library = LlamaCpp(library)
    cases = {name: recorded(name) for name in ("smollm", "qwen3", "tinyllama")}
    cases |= {"tiny": tiny, "bytes, first": pieces("first"), "bytes, always": pieces("always")}
    cases |= {f"qwen3 cut as {pre}": cut(pre) for pre in EXPRESSIONS}
    with tempfile.TemporaryDirectory() as place:
        for number, (name, write) in enumerate(cases.items()):
            if not names or name in names:
                compare(library, name, write, Path(place) / str(number))


if __name__ == "__main__":
    main(*sys.argv[1:])

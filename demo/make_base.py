"""Makes the demo's base model from nothing: corpus, tokenizer, and a small trained Llama.

    python -m pip install 'torch>=2.9' transformers tokenizers
    python demo/make_base.py

It takes about 12 minutes on two cores of a server CPU (one pass over 120,000 documents) and writes
the folder demo/base in Hugging Face's layout; --documents trades time for quality, --out writes
elsewhere. The corpus and the tokenizer depend on the seed alone. The weights also depend on the
PyTorch version, the processor and the number of threads, so a new run gives an equally good
model but not the same bytes.

The base model has read stories and pieces of stories, never a question about a story with its
answer: that is left to the fine-tuning (see make_data.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from corpus import BOS, END, PAD, SPECIAL_TOKENS, documents
from dice import Dice
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
CORPUS_SEED = 10_001
DOCUMENTS = 120_000
HELD_OUT_DOCUMENTS = 500
VOCAB_SIZE = 1536
MAX_TOKENS = 256

LEARNING_RATE = 4e-3
WARMUP_STEPS = 100
BATCH_SIZE = 16


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Returns a byte-level BPE tokenizer that begins every text with BOS, as Llama 3's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = texts
    for token in SPECIAL_TOKENS:
        plain = [text.replace(token, "\n") for text in plain]
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and a tokenizer_config.json that names the tokens and the template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_TOKENS,
        "chat_template": (HERE / "chat_template.jinja").read_text(encoding="utf-8"),
    }
    write_json(folder / "tokenizer_config.json", config)


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Returns the architecture: 4 layers, 4 query heads on 2 key-value heads, tied embeddings."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )


def batches(rows: list[list[int]], dice: Dice) -> list[list[list[int]]]:
    """Returns batches of rows of similar length, so that little is padding.

    The rows keep their order apart from a shuffle among neighbours: the corpus begins with
    documents that others build on.
    """
    plan: list[list[list[int]]] = []
    for start in range(0, len(rows), BATCH_SIZE * 50):
        pool = sorted(rows[start : start + BATCH_SIZE * 50], key=len)
        plan += dice.shuffled([pool[i : i + BATCH_SIZE] for i in range(0, len(pool), BATCH_SIZE)])
    return plan


def loss_of(model: LlamaForCausalLM, rows: list[list[int]]) -> torch.Tensor:
    """Returns the mean next-token loss of a batch; padding lies on the right and is not scored."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [model.config.pad_token_id] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    return model(input_ids=ids, labels=labels).loss


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, rows: list[list[int]]) -> float:
    """Returns the loss over all rows in nats per token."""
    model.eval()
    ordered = sorted(rows, key=len)
    total = tokens = 0.0
    for start in range(0, len(ordered), BATCH_SIZE):
        batch = ordered[start : start + BATCH_SIZE]
        scored = sum(len(row) - 1 for row in batch)
        total += loss_of(model, batch).item() * scored
        tokens += scored
    model.train()
    return total / tokens


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices of the layers and AdamW for the embedding and the norms.

    With AdamW alone the model needs more than twice as many stories to learn to look back.
    """
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(
            matrices, lr=LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train_model(model: LlamaForCausalLM, rows: list[list[int]], held_out: list[list[int]]) -> None:
    """Trains the model on one pass over the rows with warm-up and a cosine schedule."""
    plan = batches(rows, Dice(CORPUS_SEED))
    optimizers = make_optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: (
                min(1.0, (step + 1) / WARMUP_STEPS)
                * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / len(plan))))
            ),
        )
        for optimizer in optimizers
    ]
    started = time.monotonic()
    for step, batch in enumerate(plan):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 500 == 0 or step == len(plan) - 1:
            print(
                f"step {step}/{len(plan)}: loss {loss.item():.3f}, "
                f"held out {evaluate(model, held_out):.3f}, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the demo's base model.")
    parser.add_argument("--out", type=Path, default=HERE / "base")
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(CORPUS_SEED)

    # From the end come plain stories (see corpus.py); they are held out and make the tokenizer.
    texts = list(documents(CORPUS_SEED, arguments.documents + HELD_OUT_DOCUMENTS))
    tokenizer = train_tokenizer(texts[-20_000:])
    save_tokenizer(tokenizer, folder)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    longest = max(map(len, rows))
    if longest > MAX_TOKENS:
        raise SystemExit(f"a document has {longest} tokens; the model takes {MAX_TOKENS}")
    model = LlamaForCausalLM(model_config(tokenizer))
    print(
        f"{sum(map(len, rows)):,} tokens, longest document {longest}, "
        f"vocabulary {tokenizer.get_vocab_size()}, {model.num_parameters():,} parameters"
    )
    train_model(model, rows[:-HELD_OUT_DOCUMENTS], rows[-HELD_OUT_DOCUMENTS:])
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    print(f"wrote {folder}, {sum(f.stat().st_size for f in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()

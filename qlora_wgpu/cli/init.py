"""``init``: a commented YAML for a given model and data, to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.cli._converting import converted
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.data import Dataset, Preparation, Tokenizer, chosen_template, load_dataset
from qlora_wgpu.data.prepared import learns
from qlora_wgpu.data.sources import data_files, has_validation, holds_documents
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import find_family
from qlora_wgpu.visible import one_line, visible_json

_STEPS = 16  # rows of a step that is neither noisy nor slow to begin with
_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_POSITIONS = 4096  # of a model that does not say how many it was made for
_WINDOW, _LONG = 1024, 4096  # of documents, where they are longer than that


@click.command()
@click.option("--model", "model_path", help="Folder or hub name of the base.")
@click.option("--data", "data_path", help="File, folder or hub name of the data.")
@click.option("--eval", "eval_path", help="Held-out data in the same form.")
@click.option(
    "--from",
    "other",
    help="A file of Axolotl, TRL, LLaMA-Factory or mlx-lm to convert; the options above win over "
    "what it says.",
)
@click.option("--out", default="run.yaml", show_default=True, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
def init(
    model_path: str | None,
    data_path: str | None,
    eval_path: str | None,
    other: str | None,
    out: str,
    overwrite: bool,
) -> None:
    """Write a commented YAML for a model and a data file, fitted to both.

    Then `qlora-wgpu data run.yaml` shows what is learnt and `qlora-wgpu train run.yaml` trains.
    """
    console = Terminal()
    file = Path(out)
    if file.exists() and not overwrite:
        raise ConfigError(f"{out} is there already: name another with --out, or use --overwrite")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out!r} must end in .yaml")
    if other is not None:
        text = converted(other, model_path, data_path, eval_path, console)
    elif model_path is None or data_path is None:
        missing = "--model" if model_path is None else "--data"
        raise click.MissingParameter(param_hint=f"'{missing}'", param_type="option")
    else:
        if eval_path is None and has_validation(Path(data_path)):
            eval_path = data_path
        with console.status("looking at the data"):
            text = _fitted(model_path, data_path, eval_path)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{out} cannot be written: {err.strerror or err}") from err
    console.print(
        f"{out} written. Look at the data with `qlora-wgpu data {out}`, at the memory with "
        f"`qlora-wgpu estimate {out}`, and train with `qlora-wgpu train {out}`.",
        highlight=False,
    )


def _fitted(model_path: str, data_path: str, eval_path: str | None) -> str:
    """The file for a model and its data."""
    folder = ModelFolder.without_weights(model_path)
    architecture = find_family(folder.config).read(folder.config)
    tokenizer = Tokenizer.from_folder(folder.path)
    template = chosen_template(data_path, tokenizer)
    how = Preparation(max_seq_length=1 << 20, chat_template=template)
    dataset = load_dataset(data_path, tokenizer, 2, how=how)
    lengths = sorted(dataset.lengths.tolist())
    positions = folder.config.get("max_position_embeddings")
    limit = positions if isinstance(positions, int) else _POSITIONS
    path = Path(data_path)
    documents = path.exists() and holds_documents(data_files(path))
    length = _document_length(lengths, limit) if documents else _row_length(lengths, limit)
    rows = sum(max(n // length, 1) for n in lengths) if documents else len(lengths)
    return _yaml(
        model=model_path,
        train=data_path,
        held_out=eval_path,
        template=template,
        length=length,
        rows=rows,
        longest=lengths[-1],
        keep_end=not documents and _learns_only_at_the_end(dataset, length),
        packing=2 * (sum(lengths) / len(lengths)) < length,
        layers=architecture.num_layers,
    )


def _document_length(lengths: list[int], limit: int) -> int:
    """The length of windows that documents are cut into."""
    return min(_WINDOW, limit) if _common(lengths) > _LONG else _row_length(lengths, limit)


def _row_length(lengths: list[int], limit: int) -> int:
    """A length that nearly all rows fit in, if the model and most GPUs take it.

    Args:
        lengths: Tokens of each row, rising.
        limit: The model's longest text.
    """
    common = _common(lengths)
    return min(next((b for b in _BUCKETS if b >= common), _BUCKETS[-1]), limit)


def _common(lengths: list[int]) -> int:
    return lengths[min(int(0.98 * len(lengths)), len(lengths) - 1)]


def _learns_only_at_the_end(dataset: Dataset, length: int) -> bool:
    """Whether more rows have something to learn in their last tokens than in their first."""
    first = sum(learns(example.labels[:length].tolist()) for example in dataset)
    last = sum(learns(example.labels[-length:].tolist()) for example in dataset)
    return last > first


def _yaml(
    *,
    model: str,
    train: str,
    held_out: str | None,
    template: str | None,
    length: int,
    rows: int,
    longest: int,
    keep_end: bool,
    packing: bool,
    layers: int,
) -> str:
    """The file; every key that is left out has its default (configs/example.yaml)."""
    steps = max(1, -(-rows // _STEPS))
    held = f"  eval: {_quoted(held_out)}\n" if held_out else "  # eval: held-out.jsonl\n"
    chat = (
        f"  chat_template: {template:<20} # what fits the tokenizer, which has none\n"
        if template
        else ""
    )
    cut = (
        "  truncation: keep_end                # longer rows keep what is learnt\n"
        if keep_end
        else ""
    )
    return f"""\
# {one_line(Path(model).name)}, {layers} layers, on {rows:,} rows of {one_line(Path(train).name)}.
model:
  path: {_quoted(model)}

quant:
  scheme: nf4                         # 4 bits a weight; none keeps the frozen layers as they are

lora:
  r: 16                               # rank: more can learn more, and takes more memory
  lora_alpha: 32                      # the adapter counts lora_alpha / r times
  lora_dropout: 0.0
  target_modules: all-linear          # or a list: [q_proj, v_proj]

data:
  train: {_quoted(train)}
{held}{chat}\
  max_seq_length: {length:<5}               # tokens; the longest row has {longest:,}
{cut}\
  packing: {str(packing).lower():<5}                      # several rows in one of max_seq_length

train:
  num_train_epochs: 1                 # about {steps:,} steps without packing
  per_device_train_batch_size: 1
  gradient_accumulation_steps: {_STEPS}     # rows of a step: this times the batch size
  gradient_checkpointing: true        # recomputes layers: slower, much less memory

optim:
  learning_rate: 2e-4
  lr_scheduler_type: cosine
  warmup_ratio: 0.03

eval:
  eval_steps: 50                      # with data.eval

output:
  dir: runs/{_plain(Path(model).name)}
  save_steps: 50
"""


def _quoted(text: str) -> str:
    """Text as YAML takes it whatever it holds."""
    plain = all(c.isalnum() or c in "/._-" for c in text) and text[:1] not in "-."
    return text if plain else visible_json(text)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip(".") or "run"

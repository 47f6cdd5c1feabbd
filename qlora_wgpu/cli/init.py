"""``init``: a commented YAML for a given model and data, to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.data import Preparation, Tokenizer, load_dataset
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.family import find_family

_STEPS = 16  # rows of a step that is neither noisy nor slow to begin with
_BUCKETS = (128, 256, 512, 1024, 2048, 4096)
_WINDOW = 1024  # of documents


@click.command()
@click.option("--model", "model_path", required=True, help="Folder or hub name of the base.")
@click.option("--data", "data_path", required=True, help="File, folder or hub name of the data.")
@click.option("--eval", "eval_path", help="Held-out data in the same form.")
@click.option("--out", default="run.yaml", show_default=True, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
def init(model_path: str, data_path: str, eval_path: str | None, out: str, overwrite: bool) -> None:
    """Write a commented YAML for a model and a data file, fitted to both.

    Then `qlora-wgpu data run.yaml` shows what is learnt and `qlora-wgpu train run.yaml` trains.
    """
    console = Terminal()
    file = Path(out)
    if file.exists() and not overwrite:
        raise ConfigError(f"{out} is there already: name another with --out, or use --overwrite")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out!r} must end in .yaml")
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
    template = None if tokenizer.chat_template is not None else "chatml"
    how = Preparation(max_seq_length=1 << 20, chat_template=template)
    lengths = sorted(load_dataset(data_path, tokenizer, 2, how=how).lengths.tolist())
    length, rows = _length_and_rows(lengths, folder.config.get("max_position_embeddings"))
    return _yaml(
        model=model_path,
        train=data_path,
        held_out=eval_path,
        template=template,
        length=length,
        rows=rows,
        longest=lengths[-1],
        packing=2 * (sum(lengths) / len(lengths)) < length,
        layers=architecture.num_layers,
    )


def _length_and_rows(lengths: list[int], positions: object) -> tuple[int, int]:
    """A length that nearly all rows fit in, and how many rows there will be.

    Args:
        lengths: Tokens of each row, rising.
        positions: The model's longest text by its config.json.
    """
    limit = positions if isinstance(positions, int) else _BUCKETS[-1]
    common = lengths[min(int(0.98 * len(lengths)), len(lengths) - 1)]
    if common > _BUCKETS[-1]:  # documents: they are cut into windows
        length = min(_WINDOW, limit)
        return length, sum(max(n // length, 1) for n in lengths)
    return min(next(b for b in _BUCKETS if b >= common), limit), len(lengths)


def _yaml(
    *,
    model: str,
    train: str,
    held_out: str | None,
    template: str | None,
    length: int,
    rows: int,
    longest: int,
    packing: bool,
    layers: int,
) -> str:
    """The file; every key that is left out has its default (configs/example.yaml)."""
    steps = max(1, -(-rows // _STEPS))
    held = f"  eval: {_quoted(held_out)}\n" if held_out else "  # eval: held-out.jsonl\n"
    chat = (
        "  chat_template: chatml               # the tokenizer has none of its own\n"
        if template
        else ""
    )
    return f"""\
# {Path(model).name}, {layers} layers, on {rows:,} rows of {Path(train).name}.
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
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip(".") or "run"

"""What verbs that read data share: preparing it with progress, and telling what was left out."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from qlora_wgpu.config.schema import DataConfig
from qlora_wgpu.data import Dataset, Preparation, Tokenizer, load_dataset
from qlora_wgpu.errors import DataError


def preparation(settings: DataConfig) -> Preparation:
    """How rows become examples, by the ``data`` section."""
    return Preparation(
        max_seq_length=settings.max_seq_length,
        chat_template=settings.chat_template,
        row_format=settings.format,
        columns=settings.columns,
        train_on=settings.train_on,
        truncation=settings.truncation,
    )


def prepare_data(
    console: Console, settings: DataConfig, path: str, tokenizer: Tokenizer
) -> Dataset:
    """Reads and encodes a data set, or finds it prepared; prints its warnings."""
    name = Path(path).name
    with console.status(f"preparing {name}") as status:
        data = load_dataset(
            path,
            tokenizer,
            settings.max_seq_length,
            how=preparation(settings),
            cache=settings.cache,
            progress=lambda rows: status.update(f"preparing {name}: {rows:,} rows"),
        )
    for text in data.warnings:
        console.print(f"warning: {text}", style="yellow", highlight=False)
    return data


def check_ids(path: str, data: Dataset, vocabulary: int) -> None:
    """Refuses a tokenizer that makes ids which the model does not have.

    Raises:
        DataError: If there is such an id.
    """
    if data.max_token_id < vocabulary:
        return
    for number, example in enumerate(data, 1):
        largest = int(example.input_ids.max())
        if largest >= vocabulary:
            raise DataError(
                f"{path}: example {number} has the token id {largest}, but the model knows only "
                f"{vocabulary} (vocab_size in config.json): put the model's own tokenizer.json "
                "into its folder"
            )

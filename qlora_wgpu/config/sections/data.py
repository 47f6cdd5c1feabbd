"""The section of the data sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, DataPlace
from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import EvalSplit, FileName, PositiveNumber, RowFormat, Text
from qlora_wgpu.limits import TOKENS_OF_A_ROW

_MAX_NAMED = 3  # sources, in a title


class SourceConfig(Section):
    """One of several sources of training data."""

    path: FileName
    """File, folder or Hub data set, as for data.train."""
    format: RowFormat | None = None
    """Format of the rows, if it differs from data.format."""
    columns: dict[Text, Text] = Field({})
    """Names of the columns, if they differ from data.columns."""
    weight: PositiveNumber | None = None
    """Sampling weight in the mixture, relative to the other sources' weights."""
    rows: EvalSplit = None
    """Rows per epoch: a number, or a fraction below 1; null for all."""


class DataConfig(Section):
    """The data sets and how rows become tokens."""

    train: Annotated[FileName | None, FREE_ON_RESUME] = None
    """Training data (required for training): a .jsonl, .json, .csv, .parquet, .arrow or .txt file,
    a folder of them, or a data set of the Hugging Face Hub as owner/name:split, each optionally
    with a slice of rows, [FROM:TO]."""
    sources: Annotated[list[SourceConfig] | None, FREE_ON_RESUME] = Field(None, min_length=1)
    """Several data sets instead of data.train: each has a path, optionally its own format and
    columns, and optionally a weight in the mixture or a number or fraction of rows."""
    stopping_strategy: Annotated[Literal["first_exhausted", "all_exhausted"], FREE_ON_RESUME] = (
        "first_exhausted"
    )
    """When an epoch of weighted sources ends, as in interleave_datasets: before the first source
    runs out of rows (first_exhausted), or once every source has given all of its rows, with smaller
    ones repeated (all_exhausted)."""
    eval: Annotated[FileName | None, FREE_ON_RESUME] = None
    """Evaluation data, in the same formats; null for no evaluation."""
    eval_split: EvalSplit = None
    """Rows of data.train to hold out instead of data.eval, chosen by train.seed and their contents:
    a fraction such as 0.05, or a number; null for none."""
    max_seq_length: int = Field(1024, ge=2, le=TOKENS_OF_A_ROW)
    """Maximum number of tokens in a row (TRL's max_length)."""
    format: RowFormat = "auto"
    """Format of the rows: messages (or openai, chat_template), conversations (sharegpt),
    prompt/completion, instruction/output (alpaca) or text; auto detects it from the first row's
    keys."""
    columns: dict[Text, Text] = Field({})
    """The data's column names by the format's, where they differ, such as {prompt: question,
    completion: answer}; weight names a column with each row's weight in the loss."""
    apply_chat_template: bool = False
    """Whether plain-text prompts and answers (prompt/completion, instruction/output, preferences)
    become chat turns by the chat template, as in mlx-lm and LLaMA-Factory; false keeps prompts
    unchanged and uses Alpaca's prompt for instructions."""
    train_on: Literal["auto", "assistant", "last_turn", "completion", "all"] = "auto"
    """Tokens that the loss is taken on: the assistant's turns or the answer (auto, assistant), only
    the last turn (last_turn, completion), or all tokens (all; always for text); turns with weight:
    0 or train: false are masked."""
    truncation: Literal["keep_start", "keep_end", "windows", "drop", "error"] = "keep_start"
    """How to handle rows longer than max_seq_length: keep their start or their end, split them
    (windows; only text, other rows keep their start), drop them, or fail."""
    packing: bool = False
    """Whether several examples are packed into one sequence of max_seq_length tokens, without
    attention between them and with positions that restart."""
    group_by_length: bool = True
    """Whether a step's rows are grouped into micro-batches by length, which saves padding and does
    not change the result."""
    cache: Annotated[bool, FREE_ON_RESUME] = True
    """Whether prepared data is cached on disk for the next run."""
    chat_template: Annotated[Text | None, FREE_ON_RESUME] = Field(
        None,
        description="Chat template to use instead of the tokenizer's: a .jinja file, the template "
        f"itself, or a built-in name ({', '.join(BUILT_IN_CHAT_TEMPLATES)}).",
    )

    @field_validator("train", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        if isinstance(value, list):
            raise ValueError("must be one path (for several, set data.sources: [{path: …}, …])")
        return value

    @field_validator("sources")
    @classmethod
    def _one_mixture(
        cls, value: list[SourceConfig] | None, info: ValidationInfo
    ) -> list[SourceConfig] | None:
        if value is None:
            return None
        if info.data.get("train") is not None:
            raise ValueError("and data.train are mutually exclusive: remove one of them")
        weighted = sum(source.weight is not None for source in value)
        if 0 < weighted < len(value):
            raise ValueError("must have a weight for every source, or for none")
        if weighted and any(source.rows is not None for source in value):
            raise ValueError("must have either weights or rows, not both")
        return value

    @field_validator("eval_split")
    @classmethod
    def _excludes_eval(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval") is not None:
            raise ValueError("and data.eval are mutually exclusive: remove one of them")
        return value

    def parts(self) -> list[DataConfig]:
        """The section for each source of training data by itself, its path as ``train``."""
        if self.sources is None:
            return [self]
        return [
            self.model_copy(
                update={
                    "train": source.path,
                    "sources": None,
                    "format": source.format or self.format,
                    "columns": source.columns or self.columns,
                }
            )
            for source in self.sources
        ]

    @property
    def has_weights(self) -> bool:
        """Whether the rows of some source have a column of weights."""
        return any("weight" in part.columns for part in self.parts())

    @property
    def train_name(self) -> str:
        """Short names of the training data, for messages; empty if there is none."""
        names = [
            DataPlace.parse(part.train).name for part in self.parts() if part.train is not None
        ]
        if len(names) > _MAX_NAMED:
            names[_MAX_NAMED - 1 :] = [f"{len(names) - _MAX_NAMED + 1} more"]
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

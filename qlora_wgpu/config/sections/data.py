"""The section of the data sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES, DataPlace
from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import EvalSplit, FileName, PositiveNumber, RowFormat, Text
from qlora_wgpu.limits import TOKENS_OF_A_ROW

_NAMED = 3  # sources, in a title


class SourceConfig(Section):
    """One of several sources of training data."""

    path: FileName = Field(description="File, folder or data set of the hub, as data.train has it.")
    format: RowFormat | None = Field(
        None, description="Format of its rows, where it is not data.format."
    )
    columns: dict[Text, Text] = Field(
        {}, description="Names of its rows' columns, where they are not data.columns."
    )
    weight: PositiveNumber | None = Field(
        None, description="Its share of the mixture, beside the weights of all others."
    )
    rows: EvalSplit = Field(
        None, description="Rows that it gives an epoch, or a share of its own below 1; null is all."
    )


class DataConfig(Section):
    """The data sets and how rows become tokens."""

    train: Annotated[FileName | None, FREE_ON_RESUME] = Field(
        None,
        description="Training data: a .jsonl, .json, .csv, .parquet, .arrow or .txt file, a folder "
        "of them, or a data set of the Hugging Face Hub as owner/name:split (training needs one); "
        "[FROM:TO] behind it takes a slice of the rows.",
    )
    sources: Annotated[list[SourceConfig] | None, FREE_ON_RESUME] = Field(
        None,
        min_length=1,
        description="Several sources in place of data.train. Each has a path and, where they "
        "differ from data.format and data.columns, its own format and columns; a weight, or rows "
        "(a number, or a share of its own), says how much of it is used, else all is.",
    )
    stopping_strategy: Annotated[Literal["first_exhausted", "all_exhausted"], FREE_ON_RESUME] = (
        Field(
            "first_exhausted",
            description="When an epoch of weighted sources ends: before the first source runs out "
            "of rows (first_exhausted), or once the last one has given all of its rows, while "
            "others repeat theirs (all_exhausted).",
        )
    )
    eval: Annotated[FileName | None, FREE_ON_RESUME] = Field(
        None, description="Held-out data in the same formats, or null for no evaluation."
    )
    eval_split: EvalSplit = Field(
        None,
        description="Rows of data.train that are held out instead of data.eval: a share such as "
        "0.05 or a number, chosen by train.seed and the rows' contents; null for none.",
    )
    max_seq_length: int = Field(
        1024, ge=2, le=TOKENS_OF_A_ROW, description="Longest row in tokens."
    )
    format: RowFormat = Field(
        "auto",
        description="Format of the rows, by their keys: messages (also openai, chat_template), "
        "conversations (sharegpt), prompt/completion, instruction/output (alpaca) or text; auto "
        "goes by the keys of the first one.",
    )
    columns: dict[Text, Text] = Field(
        {},
        description="Names of the rows' own columns by the format's, where they differ, "
        "such as {prompt: question, completion: answer}; weight names one with each row's weight "
        "in the loss.",
    )
    apply_chat_template: bool = Field(
        False,
        description="Whether prompts and answers that are text (prompt/completion, "
        "instruction/output and, with dpo, orpo and kto, rows of answers) are written as turns of "
        "a chat, by the chat template, as mlx-lm and LLaMA-Factory do; false leaves prompts as "
        "they are, and instructions in Alpaca's prompt.",
    )
    train_on: Literal["auto", "assistant", "last_turn", "completion", "all"] = Field(
        "auto",
        description="Tokens that are learnt: the assistant's turns of a chat or a row's answer "
        "(auto, assistant), the last turn alone (last_turn, completion), or everything (all; rows "
        "of text always); never turns with weight: 0 or train: false.",
    )
    truncation: Literal["keep_start", "keep_end", "windows", "drop", "error"] = Field(
        "keep_start",
        description="Treatment of rows longer than max_seq_length: cut at the end, cut at the "
        "beginning, cut into several (windows; rows of text alone, others at the end), left out, "
        "or an error.",
    )
    packing: bool = Field(
        False,
        description="Whether several examples share a row of max_seq_length tokens; they do not "
        "see each other, and positions restart.",
    )
    group_by_length: bool = Field(
        True,
        description="Whether the rows of a step are cut into micro-batches by their length, which "
        "saves padding and changes nothing else.",
    )
    cache: Annotated[bool, FREE_ON_RESUME] = Field(
        True, description="Whether prepared data is kept on disk for the next run."
    )
    chat_template: Annotated[Text | None, FREE_ON_RESUME] = Field(
        None,
        description="Chat template used instead of the tokenizer's: a .jinja file, the template "
        f"itself, or a built-in name: {', '.join(BUILT_IN_CHAT_TEMPLATES)}.",
    )

    @field_validator("train", mode="before")
    @classmethod
    def _one_path(cls, value: object) -> object:
        if isinstance(value, list):
            raise ValueError("must be one path: several data sets are data.sources, each {path: …}")
        return value

    @field_validator("sources")
    @classmethod
    def _as_one_mixture(
        cls, value: list[SourceConfig] | None, info: ValidationInfo
    ) -> list[SourceConfig] | None:
        if value is None:
            return None
        if info.data.get("train") is not None:
            raise ValueError("cannot stand beside data.train: keep one of the two")
        weighted = sum(source.weight is not None for source in value)
        if 0 < weighted < len(value):
            raise ValueError("must give all sources a weight, or none")
        if weighted and any(source.rows is not None for source in value):
            raise ValueError("must not give sources both weights and rows")
        return value

    @field_validator("eval_split")
    @classmethod
    def _alone(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval") is not None:
            raise ValueError("cannot stand beside data.eval: keep one of the two")
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
        """What is learnt from, in few words; empty if nothing is named."""
        names = [
            DataPlace.parse(part.train).name for part in self.parts() if part.train is not None
        ]
        if len(names) > _NAMED:
            names[_NAMED - 1 :] = [f"{len(names) - _NAMED + 1} more"]
        return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

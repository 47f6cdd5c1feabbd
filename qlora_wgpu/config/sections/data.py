"""The section of the data sets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.config.section import FREE_ON_RESUME, Section
from qlora_wgpu.config.values import EvalSplit, RowFormat, Text
from qlora_wgpu.limits import TOKENS_OF_A_ROW


class DataConfig(Section):
    """The data sets and how rows become tokens."""

    train: Annotated[Text | None, FREE_ON_RESUME] = Field(
        None,
        description="Training data: a .jsonl, .json, .csv, .parquet or .txt file, a folder of "
        "them, or a data set of the Hugging Face Hub as owner/name:split (training needs one).",
    )
    eval: Annotated[Text | None, FREE_ON_RESUME] = Field(
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
        "such as {prompt: question, completion: answer}.",
    )
    train_on: Literal["auto", "assistant", "last_turn", "completion", "all"] = Field(
        "auto",
        description="Tokens that are learnt: the assistant's turns of a chat or a row's answer "
        "(auto, assistant), the last turn alone (last_turn, completion), or everything (all; rows "
        "of text always).",
    )
    truncation: Literal["keep_start", "keep_end", "drop", "error"] = Field(
        "keep_start",
        description="Treatment of rows longer than max_seq_length: cut at the end, cut at the "
        "beginning, left out, or an error.",
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

    @field_validator("eval_split")
    @classmethod
    def _alone(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and info.data.get("eval") is not None:
            raise ValueError("cannot stand beside data.eval: keep one of the two")
        return value

"""Data: files, tokenizers, chat templates, label masks and batches."""

from qlora_wgpu.data.batches import Batch, bucket_length, collate, epoch_order
from qlora_wgpu.data.chat_template import ChatTemplate, find_chat_template, suitable_template
from qlora_wgpu.data.dataset import (
    content_digest,
    encoded_examples,
    infer_chat_template,
    load_dataset,
    row_format,
    rows_in_both,
    train_test_split,
)
from qlora_wgpu.data.examples import Dataset, Example
from qlora_wgpu.data.hub_datasets import is_dataset_name
from qlora_wgpu.data.prompts import (
    PromptFormat,
    PromptKind,
    prompt_kind,
    read_prompt_files,
    save_prompt_files,
)
from qlora_wgpu.data.row_stats import PreprocessConfig
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.labels import IGNORE_INDEX

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "ChatTemplate",
    "Dataset",
    "Example",
    "PreprocessConfig",
    "PromptFormat",
    "PromptKind",
    "Tokenizer",
    "bucket_length",
    "collate",
    "content_digest",
    "encoded_examples",
    "epoch_order",
    "find_chat_template",
    "infer_chat_template",
    "is_dataset_name",
    "load_dataset",
    "prompt_kind",
    "read_prompt_files",
    "row_format",
    "rows_in_both",
    "save_prompt_files",
    "suitable_template",
    "train_test_split",
]

"""Data: files, tokenizers, chat templates, label masks and batches."""

from qlora_wgpu.data.batches import Batch, bucket_length, collate, epoch_order
from qlora_wgpu.data.chat import (
    BUILT_IN_TEMPLATES,
    ChatTemplate,
    RenderedChat,
    find_chat_template,
    render_chat,
)
from qlora_wgpu.data.dataset import Preparation, encoded_examples, load_dataset
from qlora_wgpu.data.examples import Counts, Dataset, Example
from qlora_wgpu.data.formats import FORMATS, RowEncoder, alpaca_prompt
from qlora_wgpu.data.held_out import content_digest, rows_in_both, split_off
from qlora_wgpu.data.hub_datasets import is_dataset_name
from qlora_wgpu.data.masking import assistant_spans, closing_text, end_of_turn
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.labels import IGNORE_INDEX

__all__ = [
    "BUILT_IN_TEMPLATES",
    "FORMATS",
    "IGNORE_INDEX",
    "Batch",
    "ChatTemplate",
    "Counts",
    "Dataset",
    "Example",
    "Preparation",
    "RenderedChat",
    "RowEncoder",
    "Tokenizer",
    "alpaca_prompt",
    "assistant_spans",
    "bucket_length",
    "closing_text",
    "collate",
    "content_digest",
    "encoded_examples",
    "end_of_turn",
    "epoch_order",
    "find_chat_template",
    "is_dataset_name",
    "load_dataset",
    "render_chat",
    "rows_in_both",
    "split_off",
]

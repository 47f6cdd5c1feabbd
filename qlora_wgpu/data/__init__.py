"""Data: files, tokenizers, chat templates, label masks and batches."""

from qlora_wgpu.data.batches import Batch, bucket_length, collate, epoch_order
from qlora_wgpu.data.chat import (
    BUILT_IN_TEMPLATES,
    ChatTemplate,
    RenderedChat,
    find_chat_template,
    render_chat,
)
from qlora_wgpu.data.dataset import Dataset, Example, load_dataset
from qlora_wgpu.data.formats import IGNORE_INDEX, RowEncoder, alpaca_prompt
from qlora_wgpu.data.masking import assistant_spans
from qlora_wgpu.data.tokenizer import Tokenizer

__all__ = [
    "BUILT_IN_TEMPLATES",
    "IGNORE_INDEX",
    "Batch",
    "ChatTemplate",
    "Dataset",
    "Example",
    "RenderedChat",
    "RowEncoder",
    "Tokenizer",
    "alpaca_prompt",
    "assistant_spans",
    "bucket_length",
    "collate",
    "epoch_order",
    "find_chat_template",
    "load_dataset",
    "render_chat",
]

"""A tiny random model, with a chat template, as servers of tests have it."""

from e2e.tiny import write_model

from qlora_wgpu import QLoRAModel, QuantConfig
from qlora_wgpu.data import PromptFormat, Tokenizer
from qlora_wgpu.data.chat_template import find_chat_template
from qlora_wgpu.serving.writer import ServedModel


def tiny_served(device, folder):
    """The model, and what is served of it."""
    write_model(folder)
    model = QLoRAModel.from_pretrained(folder, quant=QuantConfig(scheme="none"), device=device)
    tokenizer = Tokenizer.from_folder(folder)
    written = PromptFormat("chat", tokenizer, find_chat_template("chatml", tokenizer))
    return model, ServedModel("default", written)

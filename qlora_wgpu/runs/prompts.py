"""How prompts are written for what a run has trained, found again beside its adapter."""

from __future__ import annotations

from dataclasses import replace

from qlora_wgpu.checkpoint.tokenizer_files import PROMPT_FORMAT, tokenizer_folder
from qlora_wgpu.config import Config, load_config
from qlora_wgpu.config.as_trained import find_run
from qlora_wgpu.data import (
    Dataset,
    PromptFormat,
    Tokenizer,
    find_chat_template,
    read_prompt_files,
)
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.families.parts.config import longest_text
from qlora_wgpu.presence import exists, is_there
from qlora_wgpu.runs.opening import OpenedModel
from qlora_wgpu.runs.samples import OWN_TOKENS, Prompt, sample_prompts
from qlora_wgpu.training.rows import prompt_of_data


def prompt_of_run(settings: Config, source: OpenedModel) -> PromptFormat:
    """How prompts are written for what a run learns from.

    Raises:
        ConfigError: If ``data.train`` is not set.
        DataError: If it cannot be read.
    """
    objective = settings.train.objective
    return prompt_of_data(settings.require_train(), source.tokenizer, objective)


def run_prompts(
    settings: Config, source: OpenedModel, written: PromptFormat, data: Dataset
) -> tuple[Prompt, ...]:
    """The prompts of ``eval.sample_prompts``, written as the run's rows are, else some of the data.

    Raises:
        ConfigError: If one of them is longer than the model takes.
        DataError: If the chat template refuses one.
    """
    most = longest_text(source.pretrained.config)
    own, most_new = settings.eval.sample_prompts, settings.eval.sample_max_new_tokens
    if not own:
        return tuple(replace(prompt, most=most_new) for prompt in sample_prompts(data))
    more = most_new or OWN_TOKENS
    prompts = []
    for number, text in enumerate(own, 1):
        ids = written.ids([{"role": "user", "content": text}])
        if not ids:
            raise ConfigError(f"eval.sample_prompts: prompt {number} has no token")
        if most is not None and len(ids) + more > most:
            raise ConfigError(
                f"eval.sample_prompts: prompt {number} has {len(ids):,} tokens, and with the "
                f"{more:,} of an answer it is longer than the {most:,} that the model takes"
            )
        prompts.append(Prompt(ids, [], more))
    return tuple(prompts)


def tokenizer_for(source: OpenedModel, adapter: str | None) -> Tokenizer:
    """The base's tokenizer; what is kept beside the adapter where that has more tokens.

    Raises:
        TokenizerError: If there is none, or it is damaged.
    """
    has_none = not is_there(source.path / "tokenizer.json")
    kept = None if adapter is None else tokenizer_folder(adapter)
    own = None if kept is None else Tokenizer.from_folder(kept)
    if own is not None and (has_none or own.vocab_size > source.tokenizer.vocab_size):
        return own
    return source.tokenizer


def prompt_for(source: OpenedModel, adapter: str | None) -> PromptFormat:
    """How prompts are written for a base, or for an adapter as it was trained.

    What is kept beside the adapter counts, else the chat template that its run names, else the
    base's own.

    Raises:
        TokenizerError: If a file of the tokenizer, or the chat template, is damaged.
        CheckpointError: If the prompts' format is.
        ConfigError: If the run's config.yaml is.
    """
    folder = source.path if adapter is None else tokenizer_folder(adapter)
    if folder is not None and (adapter is None or exists(folder / PROMPT_FORMAT)):
        return read_prompt_files(folder)
    run = None if adapter is None else find_run(adapter)
    if run is None:
        return read_prompt_files(folder or source.path)
    setting = load_config(run / "config.yaml").data.chat_template
    return PromptFormat("chat", source.tokenizer, find_chat_template(setting, source.tokenizer))

"""The head of a reward model or classifier in a merged folder, and GGUF files, which have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.checkpoint.safetensors_file import Entry
from qlora_wgpu.checkpoint.tokenizer_files import tokenizer_folder
from qlora_wgpu.data.tokenizer import Tokenizer
from qlora_wgpu.errors import CheckpointError, UnsupportedModelError
from qlora_wgpu.exporting.folders import Tensors
from qlora_wgpu.families.family import SCORE, Architecture
from qlora_wgpu.files import is_there
from qlora_wgpu.lora.peft_names import WHOLE, tensor_name
from qlora_wgpu.lora.scoring_files import is_scored_adapter, read_scoring
from qlora_wgpu.model.checkpoint_reader import stored_embedding, stored_name
from qlora_wgpu.model.pretrained import Pretrained, stored_classes
from qlora_wgpu.ops.score import Scoring

FloatArray = npt.NDArray[np.float32]


def refuse_scored(adapter: str | PathLike[str], folder: ModelFolder) -> None:
    """Refuses reward models and classifiers, whose head GGUF files of language models lack."""
    if is_scored_adapter(adapter) or stored_classes(folder.config):
        raise UnsupportedModelError(
            f"{adapter} is a reward model or classifier, whose head llama.cpp does not support for "
            "this architecture: merge it, for transformers, or use qlora-wgpu classify or serve"
        )


@dataclass(frozen=True)
class ScoredHead:
    """The head ``score`` of an adapter, and what it changes in the base's folder."""

    architecture: Architecture  # with the head
    weight: FloatArray
    scoring: Scoring
    padding: int | None  # the token that scores ignore at a sequence's end
    replaced: frozenset[str]  # the base's tensors that a language model has instead
    follows: str | None  # the base's tensor that it is stored next to; None if it has a head

    @classmethod
    def of(
        cls,
        adapter: str | PathLike[str],
        folder: ModelFolder,
        base: Architecture,
        tensors: Mapping[str, FloatArray],
    ) -> ScoredHead | None:
        """The head of an adapter; None if it is one of a language model."""
        weight = tensors.get(tensor_name(SCORE.removesuffix(".weight"), WHOLE))
        if weight is None:
            if is_scored_adapter(adapter) or stored_classes(folder.config):
                raise CheckpointError(f"{adapter}: {SCORE} is missing from the adapter")
            return None
        architecture = Pretrained.from_config(folder.config).scored(len(weight)).architecture
        ends = filter(None, (base.head_name, base.head_bias))
        replaced = {stored_name(folder, base, name) for name in ends} - {SCORE}
        embedding = stored_name(folder, base, stored_embedding(folder, base))
        return cls(
            architecture,
            weight,
            read_scoring(adapter, len(weight)),
            _padding(adapter, folder),
            frozenset(replaced - {embedding}),
            None if SCORE in folder else embedding,
        )

    def tensors(self) -> Tensors:
        """The head as a tensor of the merged folder, in float32 as it was trained."""
        return {SCORE: (Entry("F32", self.weight.shape), lambda: self.weight)}

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of transformers' ``…ForSequenceClassification``."""
        names = self.scoring.names
        config = {key: value for key, value in base.items() if key != "num_labels"}
        config["architectures"] = [_class_name(base)]
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
        if not self.scoring.is_paired:
            config["problem_type"] = self.scoring.problem_type
        if self.padding is not None:
            config["pad_token_id"] = self.padding
        return config


def _padding(adapter: str | PathLike[str], folder: ModelFolder) -> int | None:
    texts = tokenizer_folder(adapter) or folder.text_folder
    if is_there(Path(texts) / "tokenizer.json"):
        tokenizer = Tokenizer.from_folder(texts)
        padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    else:
        padding, end = (folder.config.get(f"{name}_token_id") for name in ("pad", "eos"))
    if padding is not None:
        return padding
    return end[0] if isinstance(end, list) else end


def _class_name(config: Mapping[str, Any]) -> str:
    """The class's name; transformers finds the class by model_type."""
    names = config.get("architectures") or [str(config["model_type"]).title().replace("_", "")]
    return str(names[0]).partition("For")[0] + "ForSequenceClassification"

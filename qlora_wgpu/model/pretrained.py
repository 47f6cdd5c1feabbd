"""A base model's folder with what its config.json means, opened and interpreted once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.families.family import Architecture, Family, find_family
from qlora_wgpu.lora import AdapterConfig
from qlora_wgpu.lora.fitting import rows_for
from qlora_wgpu.lora.names import Float32Array
from qlora_wgpu.model.own_head import has_own_head
from qlora_wgpu.model.storage_forms import kept_in_floats, planned_formats, stored_formats
from qlora_wgpu.model.stored_shapes import check_stored_shapes


@dataclass(frozen=True)
class Pretrained:
    """A base model before anything of it is on a device.

    Attributes:
        name_or_path: How it was named.
        config: The contents of config.json.
        family: The code that computes it.
        architecture: The architecture that the family reads in config.json.
        folder: The open files; None where only config.json is known.
        notes: What the files hold otherwise than one might think, for the user to know.
        stored_as: The formats in which linear layers are quantized already, "Q4_K, Q6_K"; empty of
            a base in floats.
    """

    name_or_path: str
    config: Mapping[str, Any]
    family: Family
    architecture: Architecture
    folder: ModelFolder | None = None
    notes: tuple[str, ...] = ()
    stored_as: str = ""

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Pretrained:
        """Opens a Hugging Face folder or a model of the hub.

        Raises:
            CheckpointError: If there is no such model, or a file of it is missing or damaged.
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        folder = ModelFolder.open(str(path))
        pretrained = cls.from_folder(folder, str(path))
        check_stored_shapes(folder, pretrained.architecture)
        return pretrained

    @classmethod
    def from_folder(cls, folder: ModelFolder, name_or_path: str) -> Pretrained:
        """A folder that is open already.

        Raises:
            CheckpointError: If a file of it is damaged.
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        family = find_family(folder.config)
        architecture = family.read(folder.config)
        notes = list(folder.notes)
        formats = stored_formats(folder, architecture)
        if formats.keys() - {"NF4"}:
            told = ", ".join(f"{count} in {name}" for name, count in formats.most_common())
            notes.append(f"linear layers stay as stored: {told}")
        if kept := kept_in_floats(folder, architecture):
            notes.append(
                f"{len(kept)} of {len(architecture.every_linear)} linear layers are stored as "
                f"floats beside others that are quantized, and stay so ({kept[0]} is the first)"
            )
        if architecture.tied and has_own_head(folder, architecture):
            architecture = replace(architecture, tied=False)
            notes.append(
                f"config.json ties the head to the embedding, but the files hold another "
                f"{architecture.head_name}, which is used, as in transformers"
            )
        if more := sum(name.startswith("mtp.") for name in folder.names()):
            notes.append(
                f"{more} tensors of layers that predict further tokens (mtp.*) are not used"
            )
        stored_as = ", ".join(sorted(formats))
        return cls(
            name_or_path, folder.config, family, architecture, folder, tuple(notes), stored_as
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> Pretrained:
        """A model of which only config.json is there, for plans.

        Raises:
            UnsupportedModelError: If it asks for something that is not computed here.
        """
        family = find_family(config)
        architecture = family.read(config)
        stored_as = ", ".join(planned_formats(config, architecture))
        return cls(name, config, family, architecture, stored_as=stored_as)

    def resized(self, rows: int, new_tokens: tuple[int, ...] = ()) -> Pretrained:
        """The same base with a larger vocabulary; see ``Architecture.resized``."""
        return replace(self, architecture=self.architecture.resized(rows, new_tokens))

    def without_new(self) -> Pretrained:
        """The same base, of which only what an adapter names is trained."""
        return replace(self, architecture=replace(self.architecture, new_tokens=()))

    def for_adapter(self, stored: AdapterConfig, tensors: Mapping[str, Float32Array]) -> Pretrained:
        """The same base with the tokens that an adapter of a file has added to its own.

        Raises:
            CheckpointError: If it has trained some that do not follow on the base's.
        """
        rows = rows_for(self.architecture, stored, tensors)
        return self if rows == self.architecture.vocab_size else self.resized(rows)

    def scheme(self, quant: QuantConfig) -> str:
        """How linear layers lie on the device, in a few words: what is asked for, or stored."""
        if quant.scheme == "none" or self.stored_as in ("", "NF4"):
            return quant.scheme
        return self.stored_as

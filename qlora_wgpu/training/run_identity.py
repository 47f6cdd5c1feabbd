"""The settings, data and base weights that make a run this run and no other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from qlora_wgpu.config import Config
from qlora_wgpu.data import Dataset
from qlora_wgpu.errors import ConfigError, brief, command
from qlora_wgpu.lora import load_adapter
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.shell_words import shell_word

_SOURCES = ("train", "sources", "eval", "chat_template")
"""Settings of the data that may differ as long as the same is learnt."""


class RunIdentity:
    """The identity of a run, as every checkpoint of it keeps it."""

    def __init__(
        self,
        model: AdapterModel,
        config: Config,
        rows: Dataset,
        held_out: Dataset | None,
        references: str | None = None,
    ) -> None:
        """Begins to hash what has not been hashed of the base weights.

        Args:
            model: Base and adapter; their own settings count, not the configuration's.
            config: All other settings.
            rows: The training data.
            held_out: The held-out data.
            references: A hash of what the reference says of answers, where an objective asks it.
        """
        self._references = references
        self._folder = model.folder
        self._folder.finish_fingerprint()
        own = config.model_copy(update={"lora": model.adapter.config, "quant": model.quant})
        self._settings = {
            **own.fixed_settings(),
            "train.compute_dtype": model.compute_dtype,
            "train.gradient_dtype": model.adapter.forms.gradient,
        }
        self._data = rows.fingerprint
        self._held_out = held_out.fingerprint if held_out is not None else None
        self._sources = {key: getattr(config.data, key) for key in _SOURCES}
        begun_from = config.lora.init_from
        self._begun_from = None if begun_from is None else adapter_fingerprint(begun_from)

    @cached_property
    def record(self) -> dict[str, Any]:
        """The identity as JSON has it; waits for the base weights to be hashed."""
        return {
            "settings": json.loads(json.dumps(self._settings)),
            "data": self._data,
            "held_out_data": self._held_out,
            "sources": json.loads(json.dumps(self._sources, default=dict)),
            "base": self._folder.fingerprint,
            "begun_from": self._begun_from,
            "references": self._references,
        }

    def refuse_other(self, kept: Mapping[str, Any], where: str) -> None:
        """Makes sure that a checkpoint is this run's.

        Args:
            kept: The checkpoint's record.
            where: The run's folder.

        Raises:
            ConfigError: If something decides otherwise what is computed.
        """
        refuse_other_settings(kept["settings"], self.record["settings"], where)
        for key, name, advice in (
            ("data", "training data", "the same"),
            ("held_out_data", "held-out data", "the same"),
            ("base", "base weights", "the base that it was begun with"),
            ("references", "numbers of the reference model", "the adapter it was begun with"),
            ("begun_from", "values of the adapter in lora.init_from", "the same"),
        ):
            if kept.get(key, self.record[key]) != self.record[key]:  # older versions know fewer
                named = _named(name, kept[key], self)
                if key in ("data", "held_out_data"):
                    named += self._changes_since(kept.get("sources", {}))
                raise ConfigError(
                    f"the run in {where} was begun with other {named}: go on with {advice}, or "
                    "begin a new run in another output.dir"
                )

    def _changes_since(self, before: Mapping[str, Any]) -> str:
        """The settings that differ of where data is and how chats are written, in brackets."""
        now = self.record["sources"]
        changes = [
            f"data.{key} was {brief(old)}, now it is {brief(now[key])}"
            for key, old in before.items()
            if key in now and old != now[key]
        ]
        return f" ({'; '.join(changes)})" if changes else ""


def adapter_fingerprint(folder: str) -> str:
    """A hash of the values in an adapter's folder.

    Raises:
        CheckpointError: If they cannot be read.
    """
    digest = hashlib.sha256()
    for name, array in sorted(load_adapter(Path(folder))[0].items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def refuse_other_settings(before: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Makes sure that a run goes on with the settings that decide what is computed.

    Args:
        before: Those that it was begun with; what an older version did not know counts as equal.
        now: Those that it would go on with.
        where: The run's folder.

    Raises:
        ConfigError: If one differs.
    """
    for key, value in now.items():
        old = before.get(key, value)
        if old != value:
            kept = f"`qlora-wgpu train {shell_word(str(where))} --resume`" if command() else where
            raise ConfigError(
                f"the run in {where} was begun with {key} = {old!r}, now it is {value!r}: go on "
                f"with the old setting ({kept} has all of them), or begin a new run in another "
                "output.dir"
            )


def _named(name: str, kept: Any, identity: RunIdentity) -> str:
    """The words for what differs; of a base, it may be its config.json alone."""
    base = identity.record["base"]
    if name != "base weights" or kept["weights"] != base["weights"]:
        return name
    return "values in the base's config.json"

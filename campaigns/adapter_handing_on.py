"""Verbs that hand an adapter on: to a hub, merged, as GGUF, as a page."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest.mock import patch

import numpy as np
from huggingface_hub import constants

from campaigns.adapter_outcomes import require
from campaigns.adapter_place import IDS, PLAIN, Walked
from campaigns.local_hub import local_hub
from qlora_wgpu import QLoRAModel, QuantConfig


class HandingOn(Walked):
    """What makes something else of an adapter."""

    def _push(self) -> None:
        environment = {"HF_TOKEN": "hf_" + "a" * 34, "NO_PROXY": "127.0.0.1"}
        with (
            local_hub() as (address, files),
            patch.object(constants, "ENDPOINT", address),
            patch.dict(os.environ, environment),
        ):
            self._do("push", self._folder(), "me/mine", "--yes", "--base", "me/base")
        require({"README.md", "adapter_config.json", "adapter_model.safetensors"} <= files.keys(),
                f"only {sorted(files)} were sent")  # fmt: skip
        sent = json.loads(files["adapter_config.json"])
        require(sent["base_model_name_or_path"] == "me/base", "the base's name is not the hub's")

    def _converting(self) -> list[Any]:
        """RUN of ``merge`` and ``export``, and what says more of it."""
        return [self._folder(), *self._opening()]

    def _merge(self) -> None:
        out = self._do("merge", *self._converting(), "--out", f"{self.slug}/merged")
        require("drift" in out, out)
        merged = f"{self.slug}/merged"
        exact = self._logits(self.run / "adapter")
        with QLoRAModel.from_pretrained(self.place / merged, quant=PLAIN,
                                        compute_dtype="float32") as model:  # fmt: skip
            apart = np.abs(model.logits(IDS) - exact).max()
        require(apart < 1e-4, f"the merged model's logits are {apart:.1e} apart")
        self._ask_torch("merged", exact, model=merged)

    def _merge_nf4(self) -> None:
        """Of an adapter that is trained on 4 bits: merged into what those are."""
        if self.kind.peft is None:
            out = self.run.with_name(f"{self.slug}-nf4")
            self._do("train", self.yaml, f"output.dir={out}", "quant.scheme=nf4",
                     "train.max_steps=4", "train.compute_dtype=bfloat16")  # fmt: skip
            opening: list[Any] = [out]
        else:
            out, opening = self.run, [self.run / "adapter", "--model",
                                      self.base, "--scheme", "nf4"]  # fmt: skip
        self._do("merge", *opening, "--out", f"{self.slug}/merged-nf4", "--base", "dequantized")
        with QLoRAModel.from_pretrained(
            self.base, quant=QuantConfig(), compute_dtype="float32",
            adapter=out / "adapter",
        ) as model:  # fmt: skip
            exact = model.logits(IDS)
        with QLoRAModel.from_pretrained(self.run / "merged-nf4", quant=PLAIN,
                                        compute_dtype="float32") as model:  # fmt: skip
            apart = np.abs(model.logits(IDS) - exact).max()
        require(apart < 1e-4, f"the merged model's logits are {apart:.1e} apart")

    def _gguf(self) -> None:
        path = self.run / "whole.gguf"
        self._do("export", *self._converting(), "--gguf", path, "--type", "f32")
        exact = self._logits(self.run / "adapter")
        with QLoRAModel.from_pretrained(path, quant=PLAIN, compute_dtype="float32") as model:
            apart = np.abs(model.logits(IDS)[..., : exact.shape[-1]] - exact).max()
        require(apart < 1e-4, f"the file's logits are {apart:.1e} apart")
        self._ask_llama(path, None, exact)

    def _gguf_adapter(self) -> None:
        path = self.run / "adapter.gguf"
        self._do("export", *self._converting(), "--gguf", path, "--adapter-only")
        self._ask_llama(self._base_gguf(), path, self._logits(self.run / "adapter"))

    def _web(self) -> None:
        self._do("web", self.yaml, "--out", self.run / "site")

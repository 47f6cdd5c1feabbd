"""Verbs that train: from estimate to runs of one open model, and what is told of a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from campaigns.adapter_outcomes import Refused, as_refused, has_checkpoint, require
from campaigns.adapter_place import WEIGHTS, Walked
from qlora_wgpu import Trainer, evaluate, load_config, read_log


class Training(Walked):
    """What trains an adapter, and measures it."""

    def _estimate(self) -> None:
        self._write_yaml()
        self._do("estimate", self.yaml)

    def _data(self) -> None:
        require("what is" in self._do("data", self.yaml), "the data are not shown")

    def _train(self) -> None:
        self._write_yaml()
        out = self._do("train", self.yaml)
        require("held-out loss" in out, out[-300:])
        require((self.run / WEIGHTS).is_file(), "there is no adapter")

    def _kill(self) -> None:
        out = self.run.with_name(f"{self.slug}-killed")
        args = [sys.executable, "-m", "qlora_wgpu", "train", str(self.yaml), f"output.dir={out}"]
        process = subprocess.Popen(
            args, cwd=self.place, start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 120
        while time.monotonic() < until and not has_checkpoint(out) and process.poll() is None:
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        require(not (out / WEIGHTS).exists(), "it was not killed in the middle")
        self._resume(out, time.monotonic() + 120)
        same = (out / WEIGHTS).read_bytes() == (self.run / WEIGHTS).read_bytes()
        require(same, "the bits of the resumed run are others")
        shutil.rmtree(out)

    def _resume(self, out: Path, until: float) -> None:
        """Goes on as soon as the process is gone whose supervisor was killed."""
        while True:
            try:
                self._do("train", self.yaml, f"output.dir={out}", "--resume")
            except Refused as refused:
                if "another run is writing" not in str(refused) or time.monotonic() > until:
                    raise
                time.sleep(1)
            else:
                return

    def _init_from(self) -> None:
        """A run begins with the adapter, and moves it next to nothing."""
        out = self.run.with_name(f"{self.slug}-on")
        more = [f"lora.init_from={self.run / 'adapter'}", "train.max_steps=1",
                "optim.learning_rate=1e-9", "lora.lora_dropout=0"]  # fmt: skip
        if self.kind.lora.get("init_lora_weights"):
            stored = json.loads((self.run / "adapter/adapter_config.json").read_text())
            more += [f"lora.{key}={stored[key]}" for key in ("r", "lora_alpha")]
            more.append("lora.init_lora_weights=default")
        self._do("train", self.yaml, f"output.dir={out}", *more)
        apart = np.abs(self._logits(out / "adapter") - self._logits(self.run / "adapter")).max()
        require(apart < 1e-4, f"logits of what goes on are {apart:.1e} apart")
        shown = self._do("eval", out, "--json")
        require(json.loads(shown)["adapter"]["loss"], shown)

    def _eval(self) -> None:
        figures = json.loads(self._do("eval", self.run, "--json"))
        logged = [row["eval_loss"] for row in read_log(self.run).rows if "eval_loss" in row]
        apart = abs(figures["adapter"]["loss"] - logged[-1])
        require(apart < 1e-5, f"the loss is {apart:.1e} from the run's own")
        base = abs(figures["base"]["loss"] - logged[0])
        require(base < 1e-5, f"the base's loss is {base:.1e} from the run's first")
        shown = self._do("eval", self.run, "--generate", "--max-new-tokens", 4)
        require("exact" in shown, shown[-200:])

    def _evaluate(self) -> None:
        held_out = evaluate(load_config(self.run / "config.yaml"))
        require(held_out.adapter is not None, "the adapter is not measured")

    def _watch(self) -> None:
        require("loss" in self._do("watch", self.run, "--once"), "no loss is shown")
        page = (self.run / "report.html").read_text()
        require(page.startswith("<!doctype html>"), "no report")

    def _retrain(self) -> None:
        """Two runs, one after the other, of one open model."""
        rows = [{"prompt": "a", "completion": "b"}] * 4
        changes = {"optim.learning_rate": 1e-9, "train.max_steps": 2, "data.eval": None}
        path = self.yaml if self.kind.peft is None else f"beside-{self.kind.base}.yaml"
        before = self._logits(self.run / "adapter")
        with as_refused(), self._opened(self.run / "adapter") as model:
            for i in range(2):
                out = self.place / f"{self.slug}-again-{i}"
                config = load_config(self.place / path, {**changes, "output.dir": str(out)})
                Trainer(model, config).train(rows)
                apart = np.abs(self._logits(out / "adapter") - before).max()
                require(apart < 1e-4, f"run {i} has moved logits by {apart:.1e}")

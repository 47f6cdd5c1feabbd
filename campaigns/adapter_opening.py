"""Verbs that open an adapter: Python, texts, a server, and another adapter beside it."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np

from campaigns.adapter_outcomes import (
    QUESTION,
    answer_of,
    as_refused,
    await_server,
    outcome_of,
    require,
)
from campaigns.adapter_place import IDS, Walked
from qlora_wgpu import open_adapter
from qlora_wgpu.visible import visible


class Opening(Walked):
    """What opens an adapter, and answers with it."""

    def _python(self) -> None:
        """Open, save, open again; what PyTorch computes is asked later."""
        adapter = self.run / "adapter"
        self.base_logits = self._logits(None)
        if self.kind.peft is None:
            with open_adapter(self.run) as model:
                exact = model.logits(IDS)
                require(model.generate(QUESTION, max_new_tokens=4) is not None, "no text")
                loss, gradients = model.loss_and_grads(IDS, IDS)
                require(np.isfinite(loss) and gradients, "no gradients")
                with model.disable_adapter():
                    off = model.logits(IDS)[..., : self.base_logits.shape[-1]]
                require(np.abs(off - self.base_logits).max() < 1e-4, "it is not off")
        else:
            exact = self._logits(adapter)
        again = self.run / "again"
        with self._opened(adapter) as model:
            require(np.array_equal(model.logits(IDS), exact), "from_pretrained differs")
            model.save_adapter(again)
        require(np.array_equal(self._logits(again), exact), "what was saved again differs")
        rows = {"rows": self._rows()}
        self._ask_torch("peft", exact, model=self.kind.base, adapter=f"{self.slug}/adapter", **rows)
        self._ask_torch("peft again", exact, model=self.kind.base, adapter=f"{self.slug}/again",
                        **rows)  # fmt: skip

    def _second(self) -> None:
        """A plain one is open, and this one is loaded beside it; and the other way round."""
        own, other = self.run / "adapter", self._beside() / "adapter"
        exact = {path: self._logits(path) for path in (own, other)}
        orders = ((other, own), (own, other))
        changes_base = self.kind.lora.get("init_lora_weights") is not None
        for first, second in orders[: 1 if changes_base else 2]:
            with as_refused(), self._opened(first) as model:
                model.load_adapter(second, "second")
                require(np.array_equal(model.logits(IDS), exact[first]), "loading changed it")
                model.set_adapter("second")
                apart = np.abs(model.logits(IDS) - exact[second]).max()
                # What began as a part of its base stands on the rest alone, on the whole beside.
                most = 1e-4 if self.kind.lora.get("init_lora_weights") else 0
                require(apart <= most, f"the second is {apart:.1e} apart")
                model.set_adapter("default")
                require(np.array_equal(model.logits(IDS), exact[first]), "the first differs")
                model.delete_adapter("second")

    def _generate(self) -> None:
        out = self._do("generate", self._folder(), *self._opening(), "--prompt", QUESTION,
                       "--max-new-tokens", 8, "--chat")  # fmt: skip
        with self._opened(self.run / "adapter") as model:
            chat = [{"role": "user", "content": QUESTION}]
            expected = model.generate(chat, max_new_tokens=8)
        require(out.strip() == visible(expected).strip(), f"{out!r} instead of {expected!r}")

    def _chat(self) -> None:
        args = [sys.executable, "-m", "qlora_wgpu", "chat", self._folder(), *self._opening(),
                "--max-new-tokens", "4"]  # fmt: skip
        turns = f"{QUESTION}\n/adapter off\n{QUESTION}\n/adapter {self._beside()}\n{QUESTION}\n"
        done = subprocess.run(
            list(map(str, args)), input=turns, cwd=self.place, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        outcome_of(done)
        beside = f"answers come from {self._beside()}" in done.stderr
        told = [line for line in done.stderr.splitlines() if "adapter" in line]
        alone = "stands alone" in done.stderr or "takes no other" in done.stderr
        require(beside or alone, f"neither another adapter nor why not: {told[-1:]}")
        require(beside or "serve" in self.kind.refused, f"no other adapter: {told[-1:]}")

    def _serve(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as place:
            port = place.getsockname()[1]
        args = [sys.executable, "-m", "qlora_wgpu", "serve", self._folder(), *self._opening(),
                "beside=" + str(self._beside()), "--name", "own", "--port", port,
                "--context", 128]  # fmt: skip
        process = subprocess.Popen(
            list(map(str, args)), cwd=self.place, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        try:
            await_server(process, port)
            said = [answer_of(port, name) for name in ("own", "beside", "own", "base")[:3]]
            require(said[0] == said[2], "the same question has another answer")
        finally:
            process.terminate()
            process.communicate()
        with self._opened(self.run / "adapter") as model:
            chat = [{"role": "user", "content": QUESTION}]
            expected = model.generate(chat, max_new_tokens=8)
        require(said[0] == expected, f"{said[0]!r} instead of {expected!r}")

"""A kind of adapter in a folder of its own, and the verbs that it is taken through, in order."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from huggingface_hub import constants
from support.commands import run_here

from campaigns.adapter_kinds import VOCAB, Kind
from qlora_wgpu import (
    QLoRAModel,
    QuantConfig,
    Trainer,
    evaluate,
    load_config,
    open_adapter,
    read_log,
)
from qlora_wgpu.visible import visible

QUESTION = "what is 3 and 4?"


class Refused(Exception):
    """The verb ended with exit code 2, or raised a QLoRAError: one sentence."""


class Wrong(Exception):
    """Something is not what it has to be."""


def require(condition: object, told: str) -> None:
    """Raises ``Wrong`` where it does not hold."""
    if not condition:
        raise Wrong(told)


def outcome_of(done: Any) -> str:
    """What a command wrote, if it ended well."""
    if done.returncode == 2:
        sentence = done.stderr.strip().splitlines()[-1]
        require("Traceback" not in done.stderr, done.stderr[-500:])
        raise Refused(sentence)
    require(done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-800:]}")
    require("Traceback" not in done.stderr, done.stderr[-500:])
    return str(done.stdout)


@contextmanager
def as_refused() -> Iterator[None]:
    """Turns errors for users into ``Refused``."""
    from qlora_wgpu.errors import QLoRAError

    try:
        yield
    except QLoRAError as err:
        raise Refused(str(err)) from err


def has_checkpoint(out: Path) -> bool:
    """Whether a run has a whole checkpoint by now."""
    folder = out / "checkpoints"
    return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())


def await_server(process: Any, port: int) -> None:
    """Waits until a server answers."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if process.poll() is not None:
            _, told = process.communicate()
            if process.returncode == 2:
                raise Refused(told.strip().splitlines()[-1])
            raise Wrong(f"serve ended with {process.returncode}: {told[-500:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise Wrong("the server does not come")


def answer_of(port: int, name: str) -> str:
    """What an adapter answers, by its name."""
    body = {"model": name, "temperature": 0, "max_tokens": 8,
            "messages": [{"role": "user", "content": QUESTION}]}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


class _Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        page = f"http://{self.headers['Host']}/me/mine"
        if self.path.endswith("/preupload/main"):
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in json.loads(body)["files"]]  # fmt: skip
            self._send({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._send({"commitOid": "0" * 40, "commitUrl": f"{page}/commit/0", "success": True})
        else:
            self._send({"url": page, "name": "me/mine", "id": "1"})

    def do_GET(self) -> None:
        self._send({"id": "me/mine", "sha": "0" * 40, "siblings": [], "private": False})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def local_hub() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the files that it is sent."""
    handler = type("Handler", (_Hub,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.files
    finally:
        server.shutdown()
        server.server_close()


IDS = np.random.default_rng(7).integers(5, VOCAB, (2, 20))
PLAIN = QuantConfig(scheme="none")
WEIGHTS = "adapter/adapter_model.safetensors"
ROOT = Path(__file__).parents[1]


class Walk:
    """A kind of adapter in a folder of its own.

    Attributes:
        exact: By verb, logits that PyTorch has to give, too, and the case that computes them.
        tasks: What PyTorch is asked for.
    """

    chosen: ClassVar[list[str]] = []
    llama_library: ClassVar[str | None] = None
    _plain: ClassVar[dict[str, Path]] = {}

    def __init__(self, place: Path, kind: Kind) -> None:
        self.place, self.kind = place, kind
        self.slug = kind.slug
        self.run = place / self.slug
        self.base = place / kind.base_path
        self.yaml = place / f"{self.slug}.yaml"
        self.exact: dict[str, tuple[Any, str]] = {}
        self.tasks: list[dict[str, Any]] = []
        self.base_logits = np.zeros(0)

    def _config(self, out: str) -> dict[str, Any]:
        return {
            "model": {"path": str(self.base), **self.kind.model},
            "quant": {"scheme": "none"},
            "lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, **self.kind.lora},
            "data": {"train": str(self.place / "train.jsonl"),
                     "eval": str(self.place / "eval.jsonl"), "max_seq_length": 128},
            "train": {"max_steps": 24, "gradient_accumulation_steps": 2,
                      "compute_dtype": "float32"},
            "optim": {"learning_rate": 2e-2, "lr_scheduler_type": "constant"},
            "eval": {"sample_max_new_tokens": 8},
            "output": {"dir": str(self.place / out), "save_steps": 6},
        }  # fmt: skip

    def _write_yaml(self) -> None:
        self.yaml.write_text(json.dumps(self._config(self.slug)))

    def _do(self, *args: Any) -> str:
        done = run_here(*args, cwd=self.place)
        return outcome_of(done)

    def _folder(self) -> Path:
        return self.run if self.kind.peft is None else self.run / "adapter"

    def _opening(self) -> list[str]:
        if self.kind.peft is None:
            return []
        return ["--model", str(self.base), "--scheme", "none",
                "--compute-dtype", "float32"]  # fmt: skip

    def _opened(self, adapter: Path | None) -> QLoRAModel:
        return QLoRAModel.from_pretrained(
            self.base, quant=PLAIN, compute_dtype="float32", adapter=adapter
        )

    def _logits(self, adapter: Path | None) -> Any:
        with self._opened(adapter) as model:
            return model.logits(IDS)

    def _rows(self) -> int | None:
        added = len(self.kind.model.get("add_tokens", ()))
        return VOCAB + added if added else None

    def _beside(self) -> Path:
        """A plain adapter of the same base."""
        if self.kind.base not in self._plain:
            out = self.place / f"beside-{self.kind.base}"
            config = self._config(out.name)
            config["lora"] = {"r": 3, "lora_alpha": 8}
            config["model"] = {"path": str(self.base)}
            config["train"]["max_steps"] = 4
            (self.place / f"{out.name}.yaml").write_text(json.dumps(config))
            self._do("train", f"{out.name}.yaml")
            self._plain[self.kind.base] = out
        return self._plain[self.kind.base]

    def _base_gguf(self) -> Path:
        """The base alone in GGUF: with an adapter that does nothing."""
        path = self.place / f"{self.kind.base}.gguf"
        if not path.exists():
            nothing = self.place / f"{self.kind.base}-nothing"
            with self._opened(None) as model:
                model.save_adapter(nothing)
            self._do("export", "--model", self.base, "--adapter", nothing,
                     "--gguf", path, "--type", "f32", "--scheme", "none", "--no-check")  # fmt: skip
        return path

    def _ask_torch(self, verb: str, exact: Any, **task: Any) -> None:
        case = f"{self.slug}-{verb}"
        self.tasks.append({"case": case, "ids": IDS.tolist(), **task})
        self.exact[verb] = exact, case

    def _ask_llama(self, model: Path, adapter: Path | None, exact: Any) -> None:
        if self.llama_library is None:
            return
        script = ROOT / "tests" / "references" / "llama_cpp.py"
        asked = [sys.executable, str(script), self.llama_library, str(model),
                 str(adapter or ""), json.dumps(IDS.tolist()),
                 str(self.run / "llama.npy")]  # fmt: skip
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        require(done.returncode == 0, f"llama.cpp: {done.stderr[-300:]}")
        theirs = np.load(self.run / "llama.npy")[..., : exact.shape[-1]]
        apart = np.linalg.norm(theirs - exact) / np.linalg.norm(exact)
        # GELU is a table in float16 there.
        most = 2e-3 if self.kind.base == "gemma" else 1e-5
        require(apart < most, f"llama.cpp's logits are {apart:.1e} apart")

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
                if "another run is using" not in str(refused) or time.monotonic() > until:
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
        beside = f"using {self._beside()}" in done.stderr
        told = [line for line in done.stderr.splitlines() if "adapter" in line]
        alone = "cannot be loaded together" in done.stderr or "no other adapter can" in done.stderr
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

    def verbs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """All of them, in an order in which each has what it needs."""
        trained = ["estimate", "data", "train", "kill", "init_from", "eval", "evaluate", "watch"]
        first = [] if self.kind.peft else trained
        rest = [
            "python", "second", "retrain", "generate", "chat", "serve", "push",
            "merge", "gguf", "gguf_adapter", "merge_nf4", "web",
        ]  # fmt: skip
        if self.kind.peft:
            rest.remove("web")
        for name in [*first, *rest]:
            if not self.chosen or name in self.chosen or name == "train":
                yield name, getattr(self, f"_{name}")

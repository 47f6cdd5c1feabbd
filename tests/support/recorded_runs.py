"""What runs leave, tell and show: recorded before a change and compared after it.

usage: PYTHONPATH=.:tests python -m support.recorded_runs --record FILE [NAME ...]
       PYTHONPATH=.:tests python -m support.recorded_runs --compare FILE [NAME ...]

Each scene is a few tiny runs. All bytes of their adapters, the rows of their logs, every event that
an observer hears and every line that is shown are compared, without times and sizes of memory.
Bits are those of a driver and a processor, so a record is of one machine. The order of events is
not: with ``--events`` it is written beside ``tests/e2e/test_recorded_runs.py``, which compares it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from difflib import unified_diff
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from e2e.tiny import write_chats, write_model, write_pairs

import qlora_wgpu
from qlora_wgpu import QLoRAModel, Trainer, TrainerCallback, load_config
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.runs import prompts
from qlora_wgpu.selfcheck import results
from qlora_wgpu.training import Observer
from support.commands import run_here
from support.observing import calling, observed
from support.shared_device import share_devices

RECORDED = Path(__file__).parents[1] / "e2e" / "recorded_runs.json"
EVENTS = (
    "note", "warning", "activity", "planned", "planned_on_host", "tuned", "loading", "setup",
    "started", "resumed", "workers", "step", "evaluation", "written", "saved", "finished",
    "sampled", "reported",
)  # fmt: skip
_OF_TIME = ("tokens_per_second", "seconds", "peak_bytes", "pid", "host", "began")
_BEFORE_STEPS = ("activity", "planned", "planned_on_host", "tuned", "loading", "workers")
_TIMES = (
    (re.compile(r"[\d,]+ tok/s"), "# tok/s"),
    (re.compile(r"in [\d,]+ s, device memory at most [\d,.]+ MiB"), "in # s"),
    (re.compile(r"in [\d,]+ s;"), "in # s;"),
    (re.compile(r"planned host memory .*"), "planned host memory #"),
)

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 64}
train: {max_steps: 6, per_device_train_batch_size: 2, gradient_accumulation_steps: 2}
optim: {learning_rate: 1e-2}
eval: {eval_steps: 2}
output: {save_steps: 2}
device: {tune: never}
"""


class Told(Observer):
    """Keeps every event as a line, and fails or stops where it is asked to."""

    def __init__(self, scene: Scene, **at: Any) -> None:
        self._scene, self._at, self._counts = scene, at, dict.fromkeys(EVENTS, 0)

    def tell(self, event: str, details: tuple[Any, ...]) -> None:
        self._scene.tell(event, details)
        self._counts[event] += 1
        if (what := self._at.get(event)) is not None and what[0] == self._counts[event]:
            what[1](self)


def _event(name: str) -> Callable[..., None]:
    def tell(self: Told, *details: Any) -> None:
        self.tell(name, details)

    return tell


for _name in EVENTS:
    setattr(Told, _name, _event(_name))


class Scene:
    """A folder with a model and data, and what runs in it have told, shown and left."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        self.events = list[str]()
        for path in base.iterdir():
            (folder / path.name).symlink_to(path)

    def plain(self, value: Any) -> Any:
        """A value as JSON has it, without places and times."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {
                str(key): self.plain(each)
                for key, each in value.items()
                if str(key).rpartition("/")[2] not in _OF_TIME
            }
        if isinstance(value, list | tuple):
            return [self.plain(each) for each in value]
        if isinstance(value, str | Path):
            return self.text(str(value))
        return value

    def text(self, text: str) -> str:
        text = text.replace(str(self.folder), "PLACE")
        for pattern, instead in _TIMES:
            text = pattern.sub(instead, text)
        return text

    def tell(self, event: str, details: tuple[Any, ...]) -> None:
        if event != "planned_on_host":  # which counts what this process has taken so far
            self.say(event, details)
        if event in _BEFORE_STEPS:
            return
        known = ""
        if event in ("note", "warning"):
            known = re.sub(r"\d[\d,.e+-]*", "#", self.plain(details[0]))
        elif event in ("step", "evaluation"):
            known = str(details[0]["step"])
        elif event == "written":
            known = str(details[0])
        elif event in ("started", "resumed"):
            known = self.text(f"{details[0]} {details[1]}")
        elif event == "saved":
            known = self.text(str(details[0]))
        self.events.append(f"{event} {known}".strip())

    def say(self, what: str, value: Any) -> None:
        self.lines.append(f"{what}: {json.dumps(self.plain(value), default=str, sort_keys=True)}")

    def left(self, *names: str) -> None:
        """Notes what runs have left: hashes, rows, and which files there are."""
        for name in names:
            run = self.folder / name
            files = sorted(p.relative_to(run) for p in run.rglob("*") if p.is_file())
            self.say(f"{name} files", [str(file) for file in files])
            for file in files:
                path = run / file
                if file.name in ("metrics.jsonl", "samples.jsonl"):
                    rows = [json.loads(line) for line in path.read_text().splitlines()]
                    self.say(f"{name}/{file}", rows)
                elif file.name == "result.json":
                    self.say(f"{name}/{file}", json.loads(path.read_text()))
                elif file.suffix in (".safetensors", ".json", ".jinja", ".yaml"):
                    self.say(f"{name}/{file}", self._digest(path))

    def _digest(self, path: Path) -> str:
        data = path.read_bytes()
        if path.suffix in (".json", ".yaml"):
            text = self.text(data.decode())
            text = re.sub(r'"(seconds|pid|host|log_digest)": [^,}]+', "", text)
            text = re.sub(r'"(size|trainer_state.json)": [^,}\]]+', "", text)
            if path.name == "manifest.json":  # it hashes files with times in them
                known = json.loads(data)
                known = {k: v for k, v in known.items() if k not in ("files", "sha256")}
                text = self.text(json.dumps(known))
            data = text.encode()
        return hashlib.sha256(data).hexdigest()[:16]

    def attempt(self, what: Callable[[], Any]) -> Any:
        """The result of a run, or its error."""
        shown = StringIO()
        try:
            with redirect_stdout(shown), redirect_stderr(shown):
                result = what()
        except (QLoRAError, ZeroDivisionError) as err:
            text = f"{type(err).__name__}: {err}"
            cause = "" if err.__cause__ is None else f" <- {type(err.__cause__).__name__}"
            self.say("raised", text + cause)
            self.events.append(re.sub(r"\d[\d,.e+-]*", "#", self.text(text)) + cause)
            return None
        finally:
            self.say("shown", shown.getvalue().splitlines())
        self.say("result", result)
        return result

    def train(
        self, name: str, told: Observer | None = None, *, quiet: bool = True, **given: Any
    ) -> Any:
        """A run of run.yaml."""
        told = told or Told(self)
        given = {"dir": self.folder / name, **given}
        return self.attempt(
            lambda: qlora_wgpu.train(
                self.folder / "run.yaml", callbacks=observed(told), quiet=quiet, **given
            )
        )

    def command(self, *words: str) -> None:
        """A command, what it shows and its exit code."""
        done = run_here(*words, cwd=self.folder)
        self.say("stdout", done.stdout.splitlines())
        self.say("stderr", done.stderr.splitlines())
        said = [line for line in done.stderr.splitlines() if "error" in line]
        self.events.append(self.text(f"exit {done.returncode} {' '.join(said)}"))

    def opened(self, **options: Any) -> QLoRAModel:
        lora = qlora_wgpu.LoraConfig(r=4, lora_alpha=8, **options)
        return QLoRAModel.from_pretrained(self.folder / "model", lora)

    def settings(self, name: str, **given: Any) -> Any:
        return load_config(self.folder / "run.yaml", {"dir": self.folder / name, **given})


def stops(told: Observer) -> None:
    told.stop_run("enough")


def fails(told: Observer) -> None:
    raise ValueError("no more")


def interrupts(told: Observer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ---- scenes --------------------------------------------------------------------------------------


def chat(scene: Scene) -> None:
    """A run as the command line shows it, its end, its best adapter, texts and a page."""
    given = ["eval.load_best_model_at_end=true", "eval.sample_prompts=['what is 1 and 2?']"]
    given += ["eval.sample_steps=3", "eval.sample_max_new_tokens=4", "output.dir=run"]
    scene.command("train", "run.yaml", *given)
    scene.command("train", "run.yaml", *given)
    scene.command("train", "run.yaml", *given, "--overwrite", "--resume")
    scene.command("train", "run.yaml", *given, "--resume")
    scene.command("train", "run", "--resume", "train.max_steps=7")
    scene.left("run")


def shown(scene: Scene) -> None:
    """The same from Python, where an observer listens beside what is shown."""
    scene.train("run", quiet=False, eval_steps=3, sample_steps=3)
    scene.left("run")


def packed(scene: Scene) -> None:
    """Completions, packed, with dropout and noise; a part is held out."""
    data = {
        "train": "completions.jsonl", "eval": None, "eval_split": 0.25, "packing": True,
        "columns": {"prompt": "q", "completion": "a"},
    }  # fmt: skip
    more = {"lora_dropout": 0.1, "neftune_noise_alpha": 5.0, "optim": {"name": "lion"}}
    scene.train("run", data=data, max_steps=4, **more)
    scene.left("run")


def sources(scene: Scene) -> None:
    """A mixture, whose rows are weighed."""
    data = {
        "train": None, "eval": None, "eval_split": 3,
        "sources": [
            {"path": str(scene.folder / "train.jsonl"), "weight": 3},
            {"path": str(scene.folder / "completions.jsonl"), "weight": 1,
             "columns": {"prompt": "q", "completion": "a"}},
        ],
    }  # fmt: skip
    scene.train("run", data=data, num_train_epochs=1, max_steps=-1, logging_steps=3)
    scene.left("run")


def preferences(scene: Scene) -> None:
    """DPO, ORPO and KTO."""
    data = {"train": "pairs.jsonl", "eval": "pairs.jsonl", "cache": False}
    for objective in ("dpo", "orpo", "kto"):
        given = {"objective": objective, "max_steps": 3, "data": data, "save_steps": 3}
        scene.train(objective, **given)
        scene.left(objective)
    packed = {**data, "packing": True}
    scene.train("packed", objective="dpo", max_steps=2, data=packed)
    scene.left("packed")


def budget(scene: Scene) -> None:
    """A run that keeps some of what it computes with in host memory."""
    scene.train("whole", max_steps=2)
    scene.train("less", max_steps=2, memory="2MiB")
    scene.train("none", max_steps=2, memory="1MiB")
    scene.left("whole", "less")


def resumed(scene: Scene) -> None:
    """Runs that are stopped, by an observer or a signal, and go on with the same bits."""
    dropout = {"lora_dropout": 0.1}
    scene.train("straight", **dropout)
    for name, at in {
        "stopped": {"step": (3, stops)},
        "early": {"setup": (1, stops)},
        "signalled": {"evaluation": (2, interrupts)},
        "at last": {"step": (6, stops)},
    }.items():
        scene.train(name, Told(scene, **at), **dropout)
        scene.train(name, resume=True, **dropout)
    scene.train("stopped", resume=True, **dropout)
    scene.train("stopped", **dropout)
    scene.train("stopped", resume=True, overwrite=True)
    scene.train("stopped", resume=True, learning_rate=1e-3)
    scene.train("stopped", resume=True, max_steps=4, **dropout)
    scene.train("stopped", overwrite=True, max_steps=1)
    scene.left("straight", "stopped", "early", "signalled", "at last")


def stalled(scene: Scene) -> None:
    """Early stopping, another best figure, and a plateau."""
    patient = {"early_stopping_patience": 1, "early_stopping_threshold": 10.0, "eval_steps": 1}
    scene.train("patient", **patient)
    scene.train("patient", resume=True, **patient)
    best = {"metric_for_best_model": "mean_token_accuracy", "load_best_model_at_end": True}
    scene.train("patient", resume=True, eval_steps=1, **best)
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 1}
    kwargs = {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"}
    scene.train("plateau", lr_scheduler_kwargs=kwargs, **plateau)
    scene.left("patient", "plateau")


def failing(scene: Scene) -> None:
    """Observers that fail in each event, and the runs that go on after them."""
    for event, count in {
        "note": 1, "planned": 1, "setup": 1, "started": 1, "step": 2, "evaluation": 2, "saved": 1,
        "finished": 1, "sampled": 2, "reported": 1,
    }.items():  # fmt: skip
        given = {"max_steps": 3, "eval_steps": 2, "save_steps": 5, "compute_dtype": "bfloat16"}
        quiet = event != "saved"
        scene.train(event, Told(scene, **{event: (count, fails)}), quiet=quiet, **given)
        scene.train(event, Told(scene), resume=True, **given)
    scene.left("step", "saved")


def given_rows(scene: Scene) -> None:
    """A Trainer with rows of its own, functions that steer it, and a loop of one's own."""
    lines = (scene.folder / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tokens = [{"input_ids": list(range(5, 12 + i))} for i in range(8)]

    def steer(step: Any) -> None:
        scene.say("on_step", [step.step, step.loss, step.grad_norm, step.eval_loss])
        if step.step == 2:
            step.scale_learning_rate(0.5)
            scene.say("evaluated", step.evaluate())
        if step.step == 3:
            scene.say("saved", str(step.save()))
        if step.step == 4:
            step.stop("enough for now")

    def on_save(step: Any) -> None:
        scene.say("on_save", [step.step, str(step.saved)])

    def trainer(name: str, *callbacks: TrainerCallback, **options: Any) -> Trainer:
        given = {"eval_steps": 3, "data": {"eval": None, "eval_split": options.pop("split", None)}}
        settings = scene.settings(name, **given)
        watched = [*observed(Told(scene)), *callbacks]
        return Trainer(scene.opened(lora_dropout=0.1), settings, callbacks=watched, **options)

    own = calling(on_step_end=steer, on_save=on_save, on_evaluate=on_save)
    scene.attempt(lambda: trainer("steered", own).train(rows, rows[:4]))
    scene.attempt(lambda: trainer("steered", resume=True).train(rows, rows[:4]))
    scene.attempt(lambda: trainer("steered", resume=True).train(rows, rows[:4], overwrite=True))
    scene.attempt(lambda: trainer("steered").train(rows, resume=True, overwrite=True))
    scene.attempt(lambda: trainer("tokens").train(tokens, tokens[:2]))
    scene.attempt(lambda: trainer("split", split=0.25).train(rows))
    scene.attempt(lambda: trainer("named").train())
    scene.attempt(lambda: trainer("path").train(scene.folder / "train.jsonl"))
    scene.attempt(lambda: trainer("wrong").train([{"question": "a"}]))
    fails = calling(on_step_end=lambda step: 1 / (2 - step.step))
    scene.attempt(lambda: trainer("fails", fails).train(rows))

    def loop(name: str, last: int, **options: Any) -> Any:
        made = trainer(name)
        for step in made.steps(rows, **options):
            if step.step == last:
                break
        return made.result

    scene.attempt(lambda: loop("loop", 3))
    scene.attempt(lambda: loop("loop", 9, resume=True))
    scene.left("steered", "tokens", "split", "named", "path", "fails", "loop")


def reported(scene: Scene) -> None:
    """A service that takes no more rows."""

    class Module:
        """What stands in for trackio."""

        count = 0

        class Run:
            def log(self, values: Any, step: int) -> None:
                scene.say("logged", [step, values])
                Module.count += 1
                if Module.count == 3:
                    raise OSError("no room")

        @staticmethod
        def init(**options: Any) -> Any:
            scene.say("begun", [options["name"], options["resume"]])
            return Module.Run()

        @staticmethod
        def finish() -> None:
            scene.say("ended", None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trackio", Module)
        scene.train("run", report_to=["trackio"], max_steps=4)
        scene.train("run", report_to=["trackio"], max_steps=5, resume=True)
        scene.train("again", Told(scene, step=(2, fails)), report_to=["trackio"], max_steps=4)


def lost(scene: Scene) -> None:
    """Losses that diverge, and folders that are another's."""
    scene.train("diverged", learning_rate=10.0, max_steps=16, max_grad_norm=0.0, eval_steps=0)
    (scene.folder / "other").mkdir()
    (scene.folder / "other" / "config.json").write_text("{}")
    scene.train("other")
    (scene.folder / "file").write_text("")
    scene.train("file")
    scene.train("empty", resume=True, max_steps=1)
    (scene.folder / "empty" / "config.yaml").unlink()
    scene.train("empty", resume=True, max_steps=2)
    scene.train("nowhere", train=str(scene.folder / "nowhere.jsonl"))
    scene.left("diverged", "empty")


def cluster(scene: Scene) -> None:
    """Two workers of this machine; which does what is left to chance."""
    given = {"scheduler": "local", "workers": 2, "patience": 120.0}
    scene.train("run", cluster=given, max_steps=4, gradient_accumulation_steps=4)
    scene.lines = [line for line in scene.lines if not line.startswith(("workers", "step", "act"))]
    for path in (scene.folder / "run").rglob("metrics.jsonl"):
        path.unlink()
    scene.left("run")
    scene.lines = [line for line in scene.lines if "trainer_state" not in line[:60]]


DRIVERS_OWN = {"budget", "lost", "cluster"}
"""Scenes whose events follow from bits, from how memory is planned or from a driver's name."""

SCENES = {
    scene.__name__: scene
    for scene in (
        chat, shown, packed, sources, preferences, budget, resumed, stalled, failing, given_rows,
        reported, lost, cluster,
    )
}  # fmt: skip


def write_base(folder: Path) -> Path:
    """Model, data and configuration of all scenes."""
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    write_chats(folder / "eval.jsonl", 6, seed=1)
    write_pairs(folder / "pairs.jsonl", 9)
    rows = [{"q": f"{i} and 1?", "a": f" {i + 1}"} for i in range(30)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def played(name: str, base: Path) -> Scene:
    """A scene, played in a folder of its own with a cache of its own."""
    with tempfile.TemporaryDirectory(prefix="scene-") as folder, pytest.MonkeyPatch.context() as p:
        home = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        shaders = os.environ.get("MESA_SHADER_CACHE_DIR", home)
        p.setenv("MESA_SHADER_CACHE_DIR", shaders)  # which stays, unlike what runs keep
        p.setenv("XDG_CACHE_HOME", str(Path(folder) / "cache"))
        p.setattr(results, "check_launches", lambda *given: [])
        p.setattr(prompts, "_MAX_SECONDS", 1e9)  # three texts, however slow the machine is
        (Path(folder) / "place").mkdir()
        scene = Scene(Path(folder) / "place", base)
        SCENES[name](scene)
    return scene


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--events", action="store_true", help="record the order of events, too")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    file = given.record or given.compare
    known = json.loads(file.read_text()) if file.exists() else {}
    events = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        share_devices(patch)
        base = write_base(Path(folder))
        for name in given.names or SCENES:
            scene = played(name, base)
            print(f"{name}: {len(scene.lines)} lines", flush=True)
            if given.record:
                known[name], events[name] = scene.lines, scene.events
                file.write_text(json.dumps(known, indent=0))
                continue
            if known[name] != scene.lines:
                wrong += 1
                print("\n".join(unified_diff(known[name], scene.lines, n=0, lineterm="")))
    if given.events:
        kept = {name: lines for name, lines in events.items() if name not in DRIVERS_OWN}
        RECORDED.write_text(json.dumps(kept, indent=0) + "\n")
    print("equal" if not wrong else f"{wrong} scenes differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

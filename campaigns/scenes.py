"""Small runs that take every path to the disk, and what an undisturbed one leaves."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from e2e.tiny import write_chats, write_model

from campaigns.file_faults import Fault
from campaigns.warm_process import Command, Outcome, Worker, run, warm_up
from qlora_wgpu.cache_folder import cache_path

SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
COMMON: dict[str, dict[str, Any]] = {
    "data": {"max_seq_length": 64},
    "lora": {"r": 4, "lora_dropout": 0.1},
    "train": {
        "max_steps": 5,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2,
        "compute_dtype": "float32",
    },
    "optim": {"learning_rate": 0.01},
    "eval": {"eval_steps": 2, "load_best_model_at_end": True},
    "output": {"save_steps": 1, "save_total_limit": 1},
}
# Prepared data of whatever run, adapters that could not be saved in their place, marks of what a
# driver was tried at, and the lock of a file that had to be written anew as it could not be read.
KEPT = re.compile(r"cache/qlora-wgpu/(data/[0-9a-f]{32}|rescued|attempts|\.checked\.json\.lock$)")
TALKATIVE = "talkative"  # the folder of a base whose texts have more than one token
OLDER = "an older run"  # of another seed: what it has left is of no use to others
SCENES: dict[str, dict[str, dict[str, Any]]] = {
    "best": {},
    "two kept": {
        "log": {"logging_steps": 2},
        "data": {"eval": None, "packing": True},
        "eval": {"load_best_model_at_end": False},
        "output": {"save_steps": 2, "save_total_limit": 2},
    },
    "stops early": {
        "optim": {"learning_rate": 0.3},
        "eval": {"eval_steps": 1, "early_stopping_patience": 2},
        "output": {"save_steps": 2, "save_total_limit": None},
        "train": {"max_steps": 12},
    },
    "no checkpoint": {
        "train": {"max_steps": 3},
        "eval": {"eval_steps": 0, "load_best_model_at_end": False},
        "output": {"save_steps": 50},
    },
    "pictures": {"output": {"save_steps": 3}},
    "rewards": {
        "model": {"path": TALKATIVE},
        "train": {"objective": "grpo", "per_device_train_batch_size": 4, "max_steps": 4},
        "grpo": {
            "reward_funcs": [{"length": {"target": 4}}, {"regex": {"pattern": "[a-m]"}}],
            "num_generations": 4,
            "max_completion_length": 6,
            "steps_per_generation": 2,
            "beta": 0.04,
            "top_entropy_quantile": 0.5,
            "log_completions": True,
        },
    },
    "tensorboard": {"log": {"report_to": ["tensorboard"]}, "output": {"save_total_limit": 2}},
}


@dataclass
class Scene:
    """A configuration, and what it leaves where nothing disturbs it.

    Attributes:
        name: What it is for.
        config: Its YAML file.
        adapter: The final adapter's file.
        rows: metrics.jsonl without timings.
        files: All files' names, below the trial's folder.
        operations: Of a run with nothing prepared.
        completions: Those of samples.jsonl.
        seconds: How long it takes.
    """

    name: str
    config: Path
    adapter: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    operations: int = 0
    completions: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Trial:
    """A place of its own for one run: its folder and a cache."""

    path: Path
    scene: Scene

    @property
    def out(self) -> Path:
        return self.path / "out"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    def command(self, *options: str, fault: Fault | None = None) -> Command:
        """``train`` with the scene's configuration."""
        arguments = ("train", str(self.scene.config), *options, f"output.dir={self.out}")
        environ = {
            "XDG_CACHE_HOME": str(self.cache),
            "TMPDIR": str(self.path.parent / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "1000",
        }
        plots = self.scene.name == "pictures"
        return Command(arguments, environ, fault or Fault(self.path), plots)

    def adapter(self) -> bytes:
        with contextlib.suppress(OSError):
            return (self.out / "adapter" / "adapter_model.safetensors").read_bytes()
        return b""

    def rows(self) -> list[dict[str, Any]]:
        try:
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
            return [_without_timings(json.loads(line)) for line in lines]
        except (OSError, ValueError) as err:
            return [{"unreadable": str(err)}]

    def completions(self) -> list[str]:
        """The lines of samples.jsonl that are completions with their rewards."""
        with contextlib.suppress(OSError):
            lines = (self.out / "samples.jsonl").read_text().splitlines()
            return [line for line in lines if '"rewards"' in line]
        return []

    def files(self) -> set[str]:
        names = {p.relative_to(self.path).as_posix() for p in self.path.rglob("*")}
        return {_stable(name) for name in names if not KEPT.match(name)}

    def losses(self) -> list[str]:
        """How this differs from what an undisturbed run leaves."""
        losses = []
        if self.adapter() != self.scene.adapter:
            losses.append("another adapter" if self.adapter() else "no adapter")
        if self.rows() != self.scene.rows:
            losses.append("other rows in metrics.jsonl")
        if self.completions() != self.scene.completions:
            losses.append("other completions in samples.jsonl")
        if extra := sorted(self.files() - self.scene.files):
            losses.append(f"left behind: {extra[0]}")
        if missing := sorted(self.scene.files - self.files()):
            losses.append(f"missing: {missing[0]}")
        return losses

    def contents(self) -> dict[str, bytes]:
        """All files below the run's folder."""
        return {
            p.relative_to(self.out).as_posix(): p.read_bytes()
            for p in sorted(self.out.rglob("*"))
            if p.is_file()
        }


class Stage:
    """The model, the data and the scenes, in memory where the system has a folder there.

    Attributes:
        path: Its folder.
        quick: Whether one scene is enough, and one process for all that is not killed.
        worker: That process.
    """

    def __init__(self, path: Path, *, quick: bool = False) -> None:
        self.path = path
        self.quick = quick
        self.worker = Worker()
        (path / "tmp").mkdir()
        write_model(path / "base", **SIZES)
        vocabulary = json.loads((path / "base" / "config.json").read_text())["vocab_size"]
        # Texts are generated before and after a run: any token ends them.
        shutil.copytree(path / "base", path / TALKATIVE)
        every = json.dumps({"eos_token_id": list(range(vocabulary))})
        (path / "base" / "generation_config.json").write_text(every)
        write_chats(path / "train.jsonl", 8)
        write_chats(path / "eval.jsonl", 2, seed=1)
        self._number = 0
        self._checked = self._users_check = b""
        self._keep_compiled_shaders()
        self.scenes: dict[str, Scene] = {}
        self._changes = {**SCENES, OLDER: {"train": {"seed": 7}}}

    def scene(self, name: str) -> Scene:
        """A scene with what it leaves; run the first time that it is asked for."""
        if not self._checked:
            self._warm_up()
        if name not in self.scenes:
            scene = self.scenes[name] = Scene(name, self.config(name, self._changes[name]))
            with self.trial(scene) as trial:
                began = time.monotonic()
                outcome = self.worker.run(trial.command())
                assert outcome.code == 0, outcome.text
                scene.seconds = time.monotonic() - began
                scene.adapter, scene.rows = trial.adapter(), trial.rows()
                scene.completions = trial.completions()
                scene.files, scene.operations = trial.files(), outcome.operations
        return self.scenes[name]

    def some_scene(self, rng: random.Random) -> Scene:
        """One of those that are drawn from."""
        return self.scene("two kept" if self.quick else rng.choice(list(SCENES)))

    def run(self, command: Command, kill_after: float | None = None) -> Outcome:
        """Runs a command that may be killed."""
        return self.worker.run(command) if self.quick else run(command, kill_after)

    def define(self, name: str, **changes: dict[str, Any]) -> None:
        """Adds a scene, by what differs from the common configuration."""
        self._changes[name] = changes

    def config(self, name: str, *changes: dict[str, dict[str, Any]]) -> Path:
        """Writes the common configuration with changes."""
        sections = {section: dict(values) for section, values in COMMON.items()}
        sections["model"] = {"path": str(self.path / "base")}
        sections["data"]["train"] = str(self.path / "train.jsonl")
        sections["data"]["eval"] = str(self.path / "eval.jsonl")
        for change in changes:
            for section, values in change.items():
                sections[section] = {**sections.get(section, {}), **values}
        path = self.path / f"{name.replace(' ', '-')}.yaml"
        path.write_text(yaml.safe_dump(sections))
        return path

    @contextlib.contextmanager
    def trial(self, scene: Scene) -> Iterator[Trial]:
        """A trial in a folder that goes afterwards."""
        self._number += 1
        trial = Trial(self.path / f"trial-{self._number}", scene)
        cache = trial.cache / "qlora-wgpu"
        cache.mkdir(parents=True, mode=0o700)
        if self._checked:
            (cache / "checked.json").write_bytes(self._checked)
        try:
            yield trial
        finally:
            shutil.rmtree(trial.path, ignore_errors=True)

    def _warm_up(self) -> None:
        """A first run, which checks the driver and says what there is to import."""
        with self.trial(Scene("first", self.config("first"))) as trial:
            if self._users_check:
                (trial.cache / "qlora-wgpu" / "checked.json").write_bytes(self._users_check)
            command = trial.command()
            outcome = self.worker.run(command) if self.quick else warm_up(command)
            assert outcome.code == 0, outcome.text
            self._checked = (trial.cache / "qlora-wgpu" / "checked.json").read_bytes()

    def _keep_compiled_shaders(self) -> None:
        """Mesa's cache stays the user's, and so does what says that the driver is sound."""
        os.environ.setdefault("LP_NUM_THREADS", "1")
        os.environ.setdefault("MPLCONFIGDIR", str(self.path / "matplotlib"))
        from support.shaders import keep_compiled_shaders

        keep_compiled_shaders()
        with contextlib.suppress(OSError):
            self._users_check = cache_path("checked.json").read_bytes()


@contextlib.contextmanager
def staged(*, quick: bool = False) -> Iterator[Stage]:
    """A stage that is taken down afterwards."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=memory) as folder:
        stage = Stage(Path(folder).resolve(), quick=quick)
        try:
            yield stage
        finally:
            stage.worker.end()


def _without_timings(row: dict[str, Any]) -> dict[str, Any]:
    timings = ("second", "time", "generation_share")
    return {k: v for k, v in row.items() if not any(name in k for name in timings)}


def _stable(name: str) -> str:
    """A name without what differs from run to run: TensorBoard's have time and process."""
    return "out/tensorboard/events" if "/events.out.tfevents" in name else name

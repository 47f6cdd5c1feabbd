"""Runs that go on from checkpoints which somebody has damaged or mixed up.

usage: python -m campaigns.checkpoints [--count CORRUPTIONS] [--seed S] [--seconds T]

A damaged checkpoint is skipped with a sentence, and the run ends as if nothing had been; or
going on is refused with one, and no file is touched. A run on other weights or data, or with
another configuration, is refused; what cannot change its result is not.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.file_faults import Fault, put_folder
from campaigns.scenes import COMMON, Scene, Stage, Trial, staged
from campaigns.support import Tally, campaign
from campaigns.warm_process import Outcome

SCENE = "three kept"
EXTRA = (".nfs0001", "notes.txt", "adapter_model.bin", "adapter_model.safetensors~")
OTHER_SETTINGS = (
    "optim.learning_rate=0.02",
    "train.seed=3",
    "train.max_steps=9",
    "train.per_device_train_batch_size=1",
    "lora.r=8",
    "lora.lora_alpha=8",
    "lora.lora_dropout=0.2",
    "quant.blocksize=128",
    "train.compute_dtype=bfloat16",
    "data.train_on=all",
    "data.max_seq_length=48",
)
FREE_SETTINGS = (
    "data.cache=false",
    "train.gradient_checkpointing=false",
    "log.logging_steps=3",
    "output.save_steps=2",
    "output.save_total_limit=1",
    "device.tune=never",
)


@dataclass
class Stopped:
    """Runs that were killed in the middle, to be copied and damaged.

    Attributes:
        own: The run's folder, with three checkpoints.
        other: The same of another seed.
    """

    own: Path
    other: Path


def checkpoints(count: int, seed: int, tally: Tally) -> None:
    """The campaign, on a stage of its own."""
    with staged() as stage:
        run(stage, count, seed, tally)


def run(stage: Stage, count: int, seed: int, tally: Tally) -> None:
    """Corruptions; every tenth is of what the run was started with."""
    stage.define(SCENE, output={"save_total_limit": 3})
    scene = stage.scene(SCENE)
    stopped = Stopped(_stopped(stage, scene, "own"), _stopped(stage, scene, "other", 7))
    for number in range(tally.first, tally.first + count):
        if tally.over:
            break
        one = _identity if number % 10 == 9 else _corruption
        with stage.trial(scene) as trial:
            one(stage, trial, stopped, tally, f"{seed}/{number}")


def _stopped(stage: Stage, scene: Scene, name: str, seed: int = 0) -> Path:
    """A run that was killed when it had three checkpoints and a step to go."""
    kept = stage.path / f"stopped-{name}"
    for part in range(85, 30, -5):
        with stage.trial(scene) as trial:
            at = scene.operations * part // 100
            stage.run(trial.command(f"train.seed={seed}", fault=Fault(trial.path, at, "kill")))
            folders = {p.name for p in (trial.out / "checkpoints").glob("step-*")}
            if folders == {"step-2", "step-3", "step-4"}:
                for leftover in (trial.out / "checkpoints").glob(".*"):
                    shutil.rmtree(leftover)  # what the next run clears away is not damage
                shutil.copytree(trial.out, kept)
                return kept
    raise AssertionError("no moment has three checkpoints")


def _corruption(stage: Stage, trial: Trial, stopped: Stopped, tally: Tally, name: str) -> None:
    rng = random.Random(name)
    shutil.copytree(stopped.own, trial.out)
    kind = rng.choice(list(CORRUPTIONS))
    targets = ["step-4", *rng.choice([[], [], ["step-3"], ["step-3", "step-2"]])]
    folders = [trial.out / "checkpoints" / target for target in targets]
    best = rng.random() < 0.08 and kind != "renamed"
    if best:
        folders = [trial.out / "best"]
    before = _content(trial.out)
    what = [CORRUPTIONS[kind](folder, stopped, rng) for folder in folders]
    if _meaning(_content(trial.out)) == _meaning(before):
        tally.add("nothing changed")
        return
    changed = trial.contents()
    outcome = stage.worker.run(trial.command("--resume"))
    how = f"{name}: {kind}: {'; '.join(what)}: {outcome.gist}"
    newest = _newest(before), _newest(_content(trial.out))
    harmless = best or "all of step" in what[0] or kind == "extra file" or newest[0] == newest[1]
    _judge(trial, outcome, changed, tally, how, harmless=harmless)


def _judge(
    trial: Trial,
    outcome: Outcome,
    before: dict[str, bytes],
    tally: Tally,
    how: str,
    *,
    harmless: bool,
) -> None:
    """``harmless``: what may be used without a word, as long as the end is right."""
    passed = "is skipped" in outcome.text
    faults = outcome.faults()
    if outcome.code == 2 and "resumed from" in outcome.text:
        faults.append("gone on with, and failed")
    elif outcome.code == 2 and trial.contents() != before:
        faults.append("a refusal changed files")
    elif outcome.code == 0:
        losses = [loss for loss in trial.losses() if not _is_extra(loss)]
        faults += losses if passed else [f"in silence: {loss}" for loss in losses]
        if not faults and not passed and not harmless:
            faults.append("in silence: used although it is damaged")
    for fault in faults:
        tally.fail(fault, how)
    if not faults and outcome.code == 2:
        tally.add("refused with a sentence, nothing touched")
    elif not faults:
        tally.add(f"{'skipped' if passed else 'harmless'}, the same adapter, rows and files")


def _is_extra(loss: str) -> bool:
    """Whether a loss is only that a file lies there which is nobody's."""
    return loss.startswith("left behind") and loss.endswith(EXTRA)


def _identity(stage: Stage, trial: Trial, stopped: Stopped, tally: Tally, name: str) -> None:
    """Goes on with another base, other data or other settings under the same names."""
    rng = random.Random(name)
    shutil.copytree(stopped.own, trial.out)
    before = trial.contents()
    kind = rng.choice(["weights", "weights", "data", "settings", "free", "touched", "tokenizer"])
    with _changed(stage, kind, rng) as options:
        outcome = stage.worker.run(trial.command("--resume", *options))
    how = f"{name}: other {kind} {' '.join(options)}: {outcome.gist}"
    for fault in outcome.faults():
        tally.fail(fault, how)
    if kind in ("free", "touched"):
        if outcome.code != 0 or trial.adapter() != trial.scene.adapter:
            tally.fail(f"not gone on with: {kind}", how)
        else:
            tally.add(f"went on: {kind}")
    elif outcome.code == 0:
        tally.fail(f"in silence: gone on with other {kind}", how)
    else:
        tally.add(f"refused: other {kind}")
        if trial.contents() != before:
            tally.fail("a refusal changed files", how)


@contextmanager
def _changed(stage: Stage, kind: str, rng: random.Random) -> Iterator[list[str]]:
    """Something is another for as long as this lasts; options of the command."""
    if kind == "settings":
        yield [rng.choice(OTHER_SETTINGS)]
        return
    if kind == "free":
        yield [rng.choice(FREE_SETTINGS)]
        return
    names = {"data": "train.jsonl", "tokenizer": "base/tokenizer.json"}
    path = stage.path / names.get(kind, "base/model.safetensors")
    before, times = path.read_bytes(), path.stat()
    path.write_bytes(_OTHER[kind](before, rng))
    if kind == "weights" and rng.random() < 0.5:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    try:
        yield []
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _other_weights(content: bytes, rng: random.Random) -> bytes:
    """One number of one tensor is another by its lowest bits, or by much."""
    begin = 8 + int.from_bytes(content[:8], "little")
    number = rng.randrange((len(content) - begin) // 4)
    place = begin + 4 * number + rng.choice((0, 1, 2))
    return content[:place] + bytes([content[place] ^ rng.randint(1, 255)]) + content[place + 1 :]


def _other_data(content: bytes, rng: random.Random) -> bytes:
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    place = rng.choice(digits)
    other = rng.choice([d for d in b"0123456789" if d != content[place]])
    return content[:place] + bytes([other]) + content[place + 1 :]


def _other_tokenizer(content: bytes, rng: random.Random) -> bytes:
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    a, b = rng.sample("wha0123456789", 2)
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    return json.dumps(tokenizer).encode()


_OTHER: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "weights": _other_weights,
    "touched": lambda content, rng: content,
    "data": _other_data,
    "tokenizer": _other_tokenizer,
}


def _some_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(p for p in folder.iterdir() if p.is_file()))


def _edited(edit: Callable[[bytes, random.Random], bytes]) -> Any:
    def corrupt(folder: Path, stopped: Stopped, rng: random.Random) -> str:
        path = _some_file(folder, rng)
        path.write_bytes(edit(path.read_bytes(), rng))
        return f"{folder.name}/{path.name}"

    return corrupt


def _flip(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _zero(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    length = min(rng.choice((1, 4, 64, 4096)), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def _truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.choice((0, len(content) - 1, rng.randrange(len(content))))]


def _extend(content: bytes, rng: random.Random) -> bytes:
    return content + rng.choice((b"\0", b"\n", b" ", bytes(4096), rng.randbytes(100)))


def _repeat(content: bytes, rng: random.Random) -> bytes:
    """A block stands where another should, as after a lost write."""
    size = max(1, len(content) // 8)
    a, b = rng.randrange(0, len(content), size), rng.randrange(0, len(content), size)
    return (content[:a] + content[b : b + size] + content[a + size :])[: len(content)]


def _from_step(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    """Files of an older step of the same run."""
    steps = [p for p in (stopped.own / "checkpoints").iterdir() if p.name != folder.name]
    return _mixed(folder, rng.choice(sorted(steps)), rng)


def _from_run(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    """Files of the same step of another run."""
    if folder.name == "best":
        return _mixed(folder, stopped.other / "best", rng)
    return _mixed(folder, stopped.other / "checkpoints" / folder.name, rng)


def _mixed(folder: Path, source: Path, rng: random.Random) -> str:
    names = sorted(p.name for p in source.iterdir() if (folder / p.name).exists())
    number = rng.choice((1, 2, len(names)))
    chosen = rng.sample(names, min(number, len(names)))
    for name in chosen:
        shutil.copyfile(source / name, folder / name)
    whole = len(chosen) == len(list(folder.iterdir()))
    return f"{folder.name}: {'all' if whole else ', '.join(chosen)} of {source.name}"


def _missing(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    files = sorted(folder.iterdir())
    chosen = rng.sample(files, rng.choice((1, 2, len(files))))
    for path in chosen:
        path.unlink()
    return f"{folder.name} without {', '.join(p.name for p in chosen)}"


def _extra_file(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    name = rng.choice(EXTRA)
    (folder / name).write_bytes(rng.randbytes(50))
    return f"{folder.name}/{name}"


def _edited_json(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    """Another value under a key, in a file that is well formed."""
    path = rng.choice(sorted(folder.glob("*.json")))
    values = json.loads(path.read_bytes())
    if not isinstance(values, dict) or not values:
        return f"{path.name} unchanged"
    key = rng.choice(sorted(values))
    values[key] = _another(values[key], rng)
    path.write_text(json.dumps(values))
    return f"{folder.name}/{path.name}: {key}"


def _another(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return rng.choice((value + 1, value - 1, value * 2 + 1, -value - 1, 0.5, None, "x"))
    if isinstance(value, str):
        return rng.choice((value + "x", "", 5))
    if isinstance(value, list):
        return rng.choice((value[1:], [*value, *value], [], None))
    return rng.choice((1, "x", [], {}))


def _folder_for_file(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    path = _some_file(folder, rng)
    put_folder(path)
    return f"{folder.name}/{path.name}"


def _renamed(folder: Path, stopped: Stopped, rng: random.Random) -> str:
    """A step's whole folder under the name of another."""
    name = f"step-{rng.randint(5, 99)}{folder.name[-1]}"
    folder.rename(folder.with_name(name))
    return f"{folder.name} as {name}"


CORRUPTIONS: dict[str, Callable[[Path, Stopped, random.Random], str]] = {
    "bits flipped": _edited(_flip),
    "zeroed": _edited(_zero),
    "truncated": _edited(_truncate),
    "extended": _edited(_extend),
    "block repeated": _edited(_repeat),
    "files of another step": _from_step,
    "files of another run": _from_run,
    "missing": _missing,
    "extra file": _extra_file,
    "edited": _edited_json,
    "folder for a file": _folder_for_file,
    "renamed": _renamed,
}


def _content(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def _newest(content: dict[str, bytes | None]) -> dict[str, Any]:
    """What its newest checkpoint says."""
    return _meaning({k: v for k, v in content.items() if k.startswith("checkpoints/step-4/")})


def _meaning(content: dict[str, bytes | None]) -> dict[str, Any]:
    """Contents, with manifests as what they say: white space in them is none of it."""
    return {
        name: _parsed(data) if name.endswith("manifest.json") and data else data
        for name, data in content.items()
    }


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


assert COMMON["output"]["save_steps"] == 1  # three checkpoints, a step apart

if __name__ == "__main__":
    campaign("corrupted checkpoints", checkpoints, 1000)

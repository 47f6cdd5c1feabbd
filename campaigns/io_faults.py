"""Errors at the file operations of runs, which then go on without: nothing may be lost.

usage: python -m campaigns.io_faults [--count FAULTS] [--seed S] [--seconds T] [--first N]

A run that meets one ends with one sentence, or goes on to its end; the next one with --resume
ends with the adapter, the rows and the files of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import random
import re

from campaigns.file_faults import DEEDS, Fault, removed
from campaigns.scenes import OLDER, Stage, Trial, staged
from campaigns.support import Tally, campaign

_TAKEN_AWAY = ("other rows", "missing: out/best")
CODES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


def io_faults(count: int, seed: int, tally: Tally) -> None:
    """The campaign, on a stage of its own."""
    with staged() as stage:
        run(stage, count, seed, tally)


def run(stage: Stage, count: int, seed: int, tally: Tally) -> None:
    """Chains of runs with a fault each until there were so many."""
    met, number = 0, tally.first
    while met < count and not tally.over:
        met += chain(stage, f"{seed}/{number}", tally)
        number += 1
    tally.outcomes["faults"] = met
    tally.outcomes["chains"] = number - tally.first


def chain(stage: Stage, name: str, tally: Tally) -> int:
    """Runs with faults, then one without; how many faults were met."""
    rng = random.Random(name)
    scene = stage.some_scene(rng)
    story, met, deeds = [scene.name], 0, 0
    with stage.trial(scene) as trial:
        options = _beginning(stage, trial, rng, story)
        for _ in range(rng.choice((1, 1, 2, 4))):
            fault = _some_fault(trial, rng)
            outcome = stage.worker.run(trial.command(*options, fault=fault))
            if outcome.operations < fault.at:
                break
            story.append(str(fault))
            met += 1
            for wrong in outcome.faults():
                tally.fail(wrong, f"chain {name}: {', '.join(story)}: {outcome.gist}")
            tally.add("ended with a sentence" if outcome.code == 2 else "went on to the end")
            if fault.act in DEEDS:
                _put_right(trial)
                deeds += 1
            options = ["--resume"]
        how = f"chain {name}: {', '.join(story)}"
        _judge(stage, trial, options, tally, how, deeds=deeds)
    return met


def _beginning(stage: Stage, trial: Trial, rng: random.Random, story: list[str]) -> list[str]:
    """Sometimes a finished run's folder is there: the same to go on with, or one to replace."""
    choice = rng.random()
    if choice < 0.7:
        return []
    scene = trial.scene if choice < 0.8 else stage.scene(OLDER)
    outcome = stage.worker.run(Trial(trial.path, scene).command())
    assert outcome.code == 0, outcome.text
    story.append(f"over {scene.name}")
    return ["--resume" if choice < 0.75 else "--overwrite"]


def _some_fault(trial: Trial, rng: random.Random) -> Fault:
    at = rng.randint(1, trial.scene.operations)
    choice = rng.random()
    if choice < 0.1:
        return Fault(trial.path, at, rng.choice(sorted(DEEDS)))
    if choice < 0.15:
        return Fault(trial.path, at, "short", lasting=rng.random() < 0.5)
    code, lasting = rng.choice(CODES), rng.random() < 0.5
    return Fault(trial.path, at, "error", code, lasting=lasting, half=rng.random() < 0.3)


def _put_right(trial: Trial) -> None:
    """What its user does: away with what stands in the way."""
    for path in (trial.out, trial.out / "checkpoints", trial.out / "adapter"):
        if path.is_file():
            path.unlink()
    for path in [p for p in trial.out.rglob("inside") if p.is_dir()]:
        removed(path.parent)


def _judge(
    stage: Stage, trial: Trial, options: list[str], tally: Tally, how: str, *, deeds: int
) -> None:
    """``deeds``: how often somebody has taken away what may be beyond repair."""
    outcome = stage.worker.run(trial.command(*options))
    if outcome.code == 2 and options == ["--resume"] and not outcome.faults():
        tally.add(f"not resumed but replaced: {_kind_of(outcome.sentence)}")
        outcome = stage.worker.run(trial.command("--overwrite"))
    if outcome.code != 0 or outcome.faults():
        tally.fail("cannot be gone on with", f"{how}: {outcome.gist}")
        return
    losses = [loss for loss in trial.losses() if not _is_skipped_checkpoint(loss, trial)]
    if deeds:
        losses = [loss for loss in losses if not loss.startswith(_TAKEN_AWAY)]
    for loss in losses:
        tally.fail(loss, how)
    if not losses:
        tally.add("chains with the same adapter, rows and files")


def _is_skipped_checkpoint(loss: str, trial: Trial) -> bool:
    """Whether only an older checkpoint is another: one that was not saved ends no run."""
    newest = max(name for name in trial.scene.files if name.startswith("out/checkpoints/step-"))
    steps = re.search("out/checkpoints/step-[0-9]+", loss)
    return steps is not None and not newest.startswith(f"{steps[0]}/")


def _kind_of(sentence: str) -> str:
    """A sentence without its paths, so that its like can be counted."""
    words = [word for word in sentence.removeprefix("error: ").split() if "/" not in word]
    return " ".join(words)[:60]


if __name__ == "__main__":
    campaign("I/O faults", io_faults, 2000)

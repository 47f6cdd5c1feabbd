"""Runs that are killed, resumed, killed again ... until they end: nothing may be lost.

usage: python -m campaigns.kills [--count KILLS] [--seed S] [--seconds T] [--first N]

Half of the kills happen at a file operation, in the middle of it where it is a write; half at any
moment. A chain "S/N" is repeated by --seed S --first N --count 1,
as far as moments can be.
"""

from __future__ import annotations

import random

from campaigns.file_faults import Fault
from campaigns.scenes import OLDER, Stage, Trial, staged
from campaigns.support import Tally, campaign
from campaigns.warm_process import Outcome

LONGEST = 12  # runs of a chain, of which the last is not disturbed


def kills(count: int, seed: int, tally: Tally) -> None:
    """The campaign, on a stage of its own."""
    with staged() as stage:
        run(stage, count, seed, tally)


def run(stage: Stage, count: int, seed: int, tally: Tally) -> None:
    """Chains until there were so many kills."""
    done, number = 0, tally.first
    while done < count and not tally.over:
        done += chain(stage, f"{seed}/{number}", tally)
        number += 1
    tally.outcomes["kills"] = done
    tally.outcomes["chains"] = number - tally.first


def chain(stage: Stage, name: str, tally: Tally) -> int:
    """One run in pieces; how often it was killed."""
    rng = random.Random(name)
    scene = stage.some_scene(rng)
    story, killed = [scene.name], 0
    with stage.trial(scene) as trial:
        options = _beginning(stage, trial, rng, story)
        for link in range(LONGEST):
            outcome = _disturbed(stage, trial, options, rng, story, last=link == LONGEST - 1)
            for fault in outcome.faults():
                tally.fail(fault, f"chain {name}: {', '.join(story)}: {outcome.gist}")
            if not outcome.killed:
                break
            killed += 1
            options = ["--resume"]
        if outcome.code == 2 and "was started with" in outcome.sentence:
            # The old run, which was to be replaced, is still whole: it is not gone on with.
            tally.add("the run to be replaced was kept")
            outcome = stage.worker.run(trial.command("--overwrite"))
        _judge(trial, outcome, tally, f"chain {name}: {', '.join(story)}")
    return killed


def _beginning(stage: Stage, trial: Trial, rng: random.Random, story: list[str]) -> list[str]:
    """Sometimes another run's folder is there and to be replaced."""
    if rng.random() > 0.25:
        return []
    older = Trial(trial.path, stage.scene(OLDER))
    assert stage.worker.run(older.command()).code == 0
    story.append("over another run")
    return ["--overwrite"]


def _disturbed(
    stage: Stage,
    trial: Trial,
    options: list[str],
    rng: random.Random,
    story: list[str],
    *,
    last: bool,
) -> Outcome:
    if last:
        return stage.run(trial.command(*options))
    if rng.random() < 0.5 and not stage.quick:
        moment = rng.uniform(0.2, max(1.1, trial.scene.seconds))
        story.append(f"{moment:.2f} s")
        return stage.run(trial.command(*options), kill_after=moment)
    at = rng.randint(1, trial.scene.operations)
    half = rng.random() < 0.5
    story.append(f"operation {at}{' half' if half else ''}")
    return stage.run(trial.command(*options, fault=Fault(trial.path, at, "kill", half=half)))


def _judge(trial: Trial, outcome: Outcome, tally: Tally, how: str) -> None:
    if outcome.code != 0 and not outcome.faults():
        tally.fail("refused to go on", f"{how}: {outcome.sentence}")
        return
    losses = trial.losses()
    for loss in losses:
        tally.fail(loss, how)
    if not losses:
        tally.add("chains with the same adapter, rows and files")


if __name__ == "__main__":
    campaign("kills", kills, 1000)

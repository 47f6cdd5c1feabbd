"""Every number of a configuration, far too small, too large, or none at all.

A sentence, or a run that starts soon in little memory and ends after two steps; a run that has gone
wrong must say so.

``python -m campaigns.numbers --count N --seed S``
"""

from __future__ import annotations

import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from e2e.tiny import write_chats, write_model

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.config import Config
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.runs.training import train
from qlora_wgpu.training import Observer

SECONDS, MEMORY = 30.0, 2**30  # of computing, by all threads
STEPS = 2
VALUES: list[Any] = [
    0, 1, 2, -1, 7, 2**14, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**12, 10**400,
    -(2**63), 0.0,
    -0.0, 0.5, 1.0, 1e-300, 1e-40, 1e-12, 1e-30, 1e6, 1e15, 1e30, 1e300, 0.999999, 1 - 2**-53,
    float("nan"),
    float("inf"), float("-inf"), True, False, None, "1", "x", "1e-4", [], [1], {}, [-1], [0,
    10**12],
]  # fmt: skip
LARGE = (2**14, 2**24)


def numeric_fields() -> list[tuple[str, str]]:
    """Section and key of each field that takes a number, in whatever form."""
    return [
        (section, key)
        for section, outer in Config.model_fields.items()
        for key, field in outer.annotation.model_fields.items()  # type: ignore[union-attr]
        if takes_number(field.annotation)
    ]


def takes_number(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return any(type(value) in (int, float) for value in get_args(annotation))
    if annotation in (int, float):
        return True
    return any(takes_number(part) for part in get_args(annotation))


class Stopper(Observer):
    """Ends a run after a few steps, as Ctrl-C does."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, row: Any) -> None:
        self.steps += 1
        if self.steps == STEPS:
            signal.raise_signal(signal.SIGINT)


def settings(root: Path, section: str, key: str, value: Any) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(root / "model")},
        "data": {"train": str(root / "data.jsonl"), "cache": False},
        "lora": {"r": 2},
        "train": {"gradient_accumulation_steps": 2, "max_steps": 4},
        "output": {"dir": str(root / "out")},
        "device": {"tune": "never"},
    }
    if (section, key) == ("train", "num_train_epochs"):
        del values["train"]["max_steps"]
    values.setdefault(section, {})[key] = value
    return values


def outcome_of(values: dict[str, dict[str, Any]]) -> str:
    begin = time.process_time()
    stopper = Stopper()
    try:
        result = train(values, stopper, overwrite=True)
        outcome = "ran" if result.steps else "WRONG: ended without a step"
    except KeyboardInterrupt:  # the run was over just then
        outcome = "ran"
    except QLoRAError as err:
        outcome = f"refused ({type(err).__name__})"
        if len(str(err)) > 1000 or "\n" in str(err):
            outcome = "WRONG: the message is not one short line"
    except Exception as err:
        outcome = f"WRONG: {type(err).__name__}: {err}"[:160]
    seconds = time.process_time() - begin
    return outcome if seconds < SECONDS else f"WRONG: {seconds:.0f} s"


def run(count: int, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    every = [(*field, value) for field in numeric_fields() for value in VALUES]
    # Some thousand rows at once are what the plan says: a matter of the device's memory.
    every = [e for e in every if e[1] != "per_device_train_batch_size" or e[2] not in LARGE]
    rng.shuffle(every)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        root = Path(place)
        write_model(root / "model")
        write_chats(root / "data.jsonl")
        outcome_of(settings(root, "train", "max_steps", 4))  # the first run checks the driver, too
        peak = peak_bytes()
        for section, key, value in every[:count]:
            if tally.over:
                break
            outcome = outcome_of(settings(root, section, key, value))
            before, peak = peak, peak_bytes()  # devices of earlier runs stay for a while
            if peak - before > MEMORY:
                outcome = f"WRONG: {peak - before >> 20} MB"
            if outcome.startswith("WRONG: "):
                tally.fail(outcome.removeprefix("WRONG: "), f"{section}.{key} = {str(value)[:40]}")
            else:
                tally.add(outcome)
    print(f"at most {peak_bytes() >> 20} MB")


if __name__ == "__main__":
    campaign("numbers of the configuration", run, 2_000)

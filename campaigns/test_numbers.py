"""Every number of a configuration, far too small, too large, or none at all.

A sentence, or a run that starts soon in little memory and ends after two steps; a run that has gone
wrong must say so.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from e2e.tiny import write_chats, write_model
from hypothesis import assume, given
from hypothesis import strategies as st

from campaigns.strangers import attempt, costly
from qlora_wgpu.config import Config
from qlora_wgpu.errors import QLoRAError
from qlora_wgpu.runs.training import train
from qlora_wgpu.training import Observer

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


def sections(root: Path, section: str, key: str, value: Any) -> dict[str, dict[str, Any]]:
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


@pytest.fixture(scope="module")
def root(place: Path) -> Path:
    """The files of a run that has checked the driver."""
    write_model(place / "model")
    write_chats(place / "data.jsonl")
    train(sections(place, "train", "max_steps", 4), overwrite=True)
    return place


@pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")
@costly
@given(field=st.sampled_from(numeric_fields()), value=st.sampled_from(VALUES))
def test_a_run_with_an_odd_number_goes_on_or_is_refused(
    root: Path, field: tuple[str, str], value: Any
) -> None:
    # Some thousand rows at once are what the plan says: a matter of the device's memory.
    assume(field[1] != "per_device_train_batch_size" or value not in LARGE)

    def run() -> Any:
        with suppress(KeyboardInterrupt):  # the run was over just then
            return train(sections(root, *field, value), Stopper(), overwrite=True)

    result = attempt(run)
    assert result is None or isinstance(result, QLoRAError) or result.steps

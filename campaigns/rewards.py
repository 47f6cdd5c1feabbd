"""Runs whose reward files misbehave: each ends with one sentence, and is saved.

usage: python -m campaigns.rewards [--count RUNS] [--first N]

The sentence names the file, the function and, if one of them is to blame, the completion. No
process may be left behind, and the run resumes with a file that is well-behaved.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
from e2e.tiny import write_model, write_tokenizer

from campaigns.support import Tally, campaign
from qlora_wgpu import Config, LoraConfig, QLoRAModel, Trainer, errors

FILES: dict[str, tuple[str, str]] = {
    # what it does: the function's body, and what the message must contain
    "raises": ("raise ValueError('no such\\nthing')", r"ValueError: no such\nthing (on the compl"),
    "raises what has no text": (
        "raise type('E', (Exception,), {'__str__': None})", "score: E (on the completion",
    ),
    "loops": ("while True: pass", "no rewards within 5 s"),
    "sleeps": ("time.sleep(99)", "no rewards within 5 s"),
    "stops itself": ("os.kill(os.getpid(), signal.SIGSTOP)", "no rewards within 5 s"),
    "exits": ("sys.exit(3)", "SystemExit: 3 (on the completion"),
    "exits at once": ("os._exit(4)", "ended with exit code 4 (on the completion"),
    "kills itself": ("os.kill(os.getpid(), 9)", "ended with SIGKILL (on the completion"),
    "crashes": ("ctypes.string_at(0)", "ended with SIGSEGV (on the completion"),
    "interrupts itself": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "returns NaN": ("return [math.nan] * n", "returned nan, not a finite number"),
    "returns infinity": ("return [math.inf] * n", "returned inf, not a finite number"),
    "returns what is too large": ("return [10 ** 400] * n", "returned inf, not a finite number"),
    "returns integers of many digits": ("return [10 ** 9999] * n", "returned inf, not a finite"),
    "returns text": ("return ['1.0'] * n", "returned '1.0', not a finite number"),
    "returns objects": ("return [object()] * n", "not a finite number or None"),
    "returns complex numbers": ("return [1j] * n", "returned '1j', not a finite number"),
    "returns too few": ("return [1.0] * (n - 1)", "returned 7 rewards for 8 completions"),
    "returns too many": ("return [1.0] * 10**7", "returned more than 8 rewards for 8 completions"),
    "returns without end": ("return itertools.count()", "returned more than 8 rewards for 8 com"),
    "returns nothing": ("pass", "TypeError: 'NoneType' object is not iterable"),
    "returns a number": ("return 1.0", "TypeError: 'float' object is not iterable"),
    "gives no reward at all": ("return [None] * n", ""),
    "recurses": ("return score(**batch)", "RecursionError"),
    "takes all memory": (
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30,) * 2); b = bytearray(1 << 31)",
        "MemoryError",
    ),
    "prints much": (
        "for _ in range(1 << 8): print('x' * (1 << 19))\n    return [1.0] * (n + 1)",
        "returned more than 8 rewards",
    ),
    "closes its output": ("os.close(1); os.close(2); return [1.0]", "returned 1 rewards"),
    "closes everything": ("os.closerange(0, 99); return [1.0]", "ended with exit code 1"),
    "closes everything and stays": (
        "os.closerange(0, 99); time.sleep(99)", "closed the pipe",
    ),
    "writes to its pipe": ("os.write(4, b'{}\\n'); return [1.0]", "it has written to the pipe"),
    "writes much to its pipe": ("os.write(4, b'[' * (1 << 25))", "written to the pipe"),
    "forks": ("os.fork(); return [1.0]", "returned 1 rewards"),
    "forks many": ("[os.fork() for _ in range(4)]; return [1.0]", "returned 1 rewards"),
    "leaves a process": ("os.fork() or time.sleep(99); return [1.0]", "returned 1 rewards"),
    "leaves a process and exits": ("os.fork() or time.sleep(99); os._exit(5)", "exit code 5"),
    "leaves a thread": (
        "threading.Thread(target=time.sleep, args=(99,)).start(); sys.exit(2)", "SystemExit: 2",
    ),
    "reads its input": ("input()", "EOFError"),
    "leaves its folder": ("os.chdir('/'); os.umask(0); raise OSError('gone')", "OSError: gone"),
}  # fmt: skip
WHOLE: dict[str, tuple[str, str]] = {
    "is no Python": ("def score(:", "SyntaxError"),
    "has no such function": ("def other(): pass", "it has no function score"),
    "imports what is missing": ("import nothing_of_that_name", "ModuleNotFoundError"),
    "raises when imported": ("raise RuntimeError('x')", "RuntimeError: x"),
    "exits when imported": ("import os; os._exit(7)", "ended with exit code 7"),
    "is binary": ("\0\1\2", "SyntaxError"),
    "is empty": ("", "it has no function score"),
    "has a number of that name": ("score = 3", "it has no function score"),
}
_IMPORTS = "import ctypes, itertools, math, os, resource, signal, sys, threading, time\n"
ROWS = [{"prompt": text} for text in ("abc", "de f", "gh, i", "jkl.")]
GOOD = "def score(completions, **_):\n    return [len(str(c)) / 99 for c in completions]\n"


def rewards(count: int, seed: int, tally: Tally) -> None:
    """Runs every file, from the first on."""
    del seed
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        write_model(place / "model")
        write_tokenizer(place / "model")
        model = QLoRAModel.from_pretrained(
            place / "model", LoraConfig(r=4), compute_dtype="float32"
        )
        begin = f"{_IMPORTS}def score(**batch):\n    n = len(batch['completions'])\n    "
        files = {name: (begin + body, expected) for name, (body, expected) in FILES.items()}
        for name, (text, expected) in [*(files | WHOLE).items()][tally.first :][:count]:
            if tally.over:
                break
            _judge(model, place, name, text, expected, tally)


def _judge(
    model: QLoRAModel, place: Path, name: str, text: str, expected: str, tally: Tally
) -> None:
    file = place / "rewards.py"
    file.write_text(text)
    message = _message(model, file)
    where = f"{file}:score"
    starts = name not in WHOLE
    if name == "gives no reward at all":
        where = ""
    wrong = []
    if message is None and where:
        wrong.append("no error")
    elif message is not None:
        if "\n" in message or len(message) > 1000:
            wrong.append("not a sentence")
        if where not in message or expected not in message:
            wrong.append("not the expected message")
        if starts and "the run is saved after step 0" not in message:
            wrong.append("not saved")
    with contextlib.suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        left = [each for each in children if "reward_process" in " ".join(each.cmdline())]
        if left:
            wrong.append("a process is left")
    file.write_text(GOOD)
    if starts and (again := _message(model, file, resume=True)) is not None:
        wrong.append(f"does not resume ({again})")
    for each in wrong:
        tally.fail(each, f"{name}: {message}")
    if not wrong:
        tally.add("ended with its sentence")
        print(f"{name}: {message}".replace(str(place), ""), flush=True)


def _settings(file: Path) -> Config:
    return Config(
        model={"path": str(file.parent / "model")}, data={"max_seq_length": 32},
        train={
            "objective": "grpo", "max_steps": 1, "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 1,
        },
        grpo={
            "reward_funcs": [f"{file}:score"], "reward_timeout": 5,
            "num_generations": 4, "max_completion_length": 4,
        },
        output={"dir": str(file.parent / "run")},
    )  # fmt: skip


def _message(model: QLoRAModel, file: Path, **options: Any) -> str | None:
    """The message that a run ends with; None if it does not fail."""
    options = options or {"overwrite": True}
    null = os.open(os.devnull, os.O_WRONLY)
    shown = os.dup(2)
    os.dup2(null, 2)  # what reward functions print
    try:
        Trainer(model, _settings(file), allow_code=True, **options).train(ROWS)
    except errors.QLoRAError as err:
        return str(err)
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(null)
    return None


if __name__ == "__main__":
    campaign("reward files", rewards, len(FILES) + len(WHOLE))

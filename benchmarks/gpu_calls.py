"""What each call of benchmarks/gpu.py measures, the most telling first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_rows import read_rows
from gpu_session import Part, Session
from shapes import config_of

HERE = Path(__file__).parent
ALONE = 4  # the call that measures only its own parts
_SHARDS = 4  # processes that check a backend's kernels at once
_OWN = ("--variant", "own", "--dtype", "bfloat16", "--fewest")  # what a run's kernels execute
_AT_ONCE = ("peft", "peft-graphs", "unsloth")  # rivals that begin without compiling for a minute
_PATIENCE, _COMPILING = 150, 260  # seconds in which a participant has its turn, or is ended
_TURNS_SECONDS = 275  # of a part whose turns go on where the last call ended them
_EXPLORERS = ("explore", "explore_attention", "explore_gradients")
_EXPLORING = 160.0  # seconds of each
REGISTERS = HERE / "results" / "explored-sm_90.json"
BACKENDS = ("dawn", "wgpu")  # the faster one first


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        small: The shape of which every figure is taken.
        large: The one that fills a card.
        beside: A third for the peer.
        seq: Tokens of a row.
        long: Tokens of a row with checkpointing.
        attention: Tokens of rows of attention alone.
        heads: Its heads, and those of keys and values.
        head_dims: Its sizes of a head.
        tests: What pytest runs.
        checks: Which kernels are checked; all where it is empty.
        steps: How many steps count.
        states: The config.json of a model with linear attention, by its sizes.
        texts: How many texts grow at a time.
        least: About how many seconds steps of the small shape take, from a process's start to its
            end; they are not begun with fewer left. Of the large shape it is twice that.
        software: Whether processors and software GPUs are measured, too.
        row_seconds: After how many a measurement counts as hung; 0 for never.
        works: Rows and tokens of steps beside rivals', as gpu_rivals.py takes them.
        compiled: The same of those whose rivals compile first, which takes a minute each.
        turns: Rounds of them, the steps of a turn, and seconds that those before them take.
    """

    small: str = "llama-3.2-1b"
    large: str = "llama-3.1-8b"
    beside: str = "qwen2.5-0.5b"
    seq: int = 1024
    long: int = 2048
    attention: tuple[int, ...] = (1024, 2048, 8192)
    heads: tuple[int, int] = (32, 8)
    head_dims: tuple[int, ...] = (64, 128)
    tests: tuple[str, ...] = (
        "tests/ops", "tests/gpu tests/selfcheck tests/graph",
        "tests/e2e/test_recorded_references.py tests/e2e/test_family_references.py",
    )  # fmt: skip
    checks: tuple[str, ...] = ()
    steps: int = 20
    states: tuple[int, ...] = (1024, 3584, 24, 8, 2, 248_320, 256, 128, 16)
    texts: tuple[int, ...] = (1, 8, 64)
    least: float = 40.0
    software: bool = False
    row_seconds: float = 60.0
    works: tuple[str, ...] = ("1x1024", "4x1024", "2x2048p")
    compiled: tuple[str, ...] = ("1x1024", "4x1024", "2x2048p")
    turns: tuple[int, int, float] = (3, 10, 1.0)


SMALL = Sizes(
    "S",
    "M",
    "S",
    64,
    128,
    (64, 128),
    (4, 2),
    (16, 32),
    ("tests/gpu/test_wgsl.py",),
    ("embedding",),
    3,
    (64, 96, 2, 2, 1, 512, 32, 16, 4),
    (1, 2),
    15.0,
    True,
    0.0,
    ("1x64", "2x64p"),
    ("1x64",),
    (2, 3, 0.0),
)


class Calls:
    """The parts of each call."""

    def __init__(self, sizes: Sizes, session: Session, backends: list[str], peft: str) -> None:
        self._sizes, self._backends, self._peft = sizes, backends, peft
        self._models = session.folder / "models"
        self._models.mkdir(exist_ok=True)

    @property
    def _peft_step(self) -> list[str]:
        return [self._peft, str(HERE / "peers" / "peft_step.py")]

    @property
    def _own_step(self) -> list[str]:
        return [sys.executable, str(HERE / "peers" / "ours_step.py")]

    def parts(self, call: int) -> list[Part]:
        calls = {1: self._first, 2: self._second, 3: self._third, ALONE: self._explorers}
        return list(calls[call]())

    def devices(self) -> list[Part]:
        """What all others need, whichever call comes first."""
        return [
            self._script("probe", f"device-{backend}", backend, "--only", "device", seconds=45)
            for backend in self._backends
        ]

    def opened(self, session: Session) -> dict[str, str]:
        """The names of what backends open, without software GPUs where cards are asked for."""
        found = {}
        for backend in self._backends:
            if session.is_done(f"device-{backend}"):
                rows = read_rows(session.file(f"device-{backend}", "jsonl"))
                about: dict[str, Any] = next((r for r in rows if r["key"] == "about"), {})
                kind = about.get("info", {}).get("adapter_type", "")
                if self._sizes.software or kind != "CPU":
                    found[backend] = str(about.get("name", ""))
        return found

    def measure_with(self, backends: Iterable[str]) -> None:
        """Leaves out the other backends; a driver may be too old for Dawn's."""
        self._backends = [name for name in self._backends if name in backends]

    def _first(self) -> Iterator[Part]:
        """Whether it runs right and how fast beside rivals; then what could be mended."""
        sizes, (best, *others) = self._sizes, self._backends
        yield Part("doctor", [sys.executable, "-m", "qlora_wgpu", "doctor"], 60, 5, together="own")
        for backend in self._backends:
            yield self._checks(f"own-{backend}", backend, "own", *_OWN)
        yield self._torch()
        for shape in (sizes.small, sizes.large):
            yield self._bench(shape, sizes.seq, best)
            yield self._rivals(shape, best)
            yield self._layers(shape, sizes.seq, best)
        yield self._attention(best)
        yield self._losses("peft", self._peft_step)
        yield self._losses(best, self._own_step)
        for backend in self._backends:
            yield self._script("probe", f"ceilings-{backend}", backend, "--only", "ceilings")
        for shard in range(_SHARDS):
            for backend in self._backends:
                shards = ["--shard", f"{shard}/{_SHARDS}"]
                yield self._checks(f"checks-{backend}-{shard}", backend, "checks", *shards)
        for other in others:
            yield self._bench(sizes.small, sizes.seq, other)

    def _second(self) -> Iterator[Part]:
        sizes, best = self._sizes, self._backends[0]
        yield self._bench(sizes.small, sizes.seq, best, "--tune")
        yield self._bench(sizes.large, sizes.seq, best, "--tune", seconds=240)
        yield self._others(sizes.small, best, "texts")
        yield self._generation(sizes.small)
        yield self._rivals(sizes.small, best, compiled=True)
        yield self._bench(sizes.small, sizes.seq, best, "--batch", "4")
        yield self._peer(sizes.large, sizes.long, "--checkpointing")
        yield self._bench(sizes.large, sizes.long, best, "--checkpointing", seconds=240)
        for kind in ("dpo", "budget"):
            yield self._others(sizes.small, best, kind)
        yield self._others(sizes.large, best, "texts")
        yield self._generation(sizes.large)
        yield self._rivals(sizes.large, best, compiled=True)
        yield self._with_states(best)
        yield self._peer(sizes.beside, sizes.seq)
        yield self._bench(sizes.beside, sizes.seq, best)

    def _third(self) -> Iterator[Part]:
        sizes, (best, *others) = self._sizes, self._backends
        spread = ["-n", "4"] if find_spec("xdist") else []
        for number, paths in enumerate(sizes.tests):
            for backend in self._backends:
                command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
                yield Part(
                    f"tests-{number}-{backend}", [*command, *spread, *paths.split()], 240, 20,
                    {"QLORA_WGPU_BACKEND": backend}, needs=f"device-{backend}",
                )  # fmt: skip
        for other in others:
            yield self._losses(other, self._own_step)
            yield self._bench(sizes.large, sizes.seq, other, seconds=240)
            yield self._layers(sizes.small, sizes.seq, other)
            yield self._attention(other)
            yield self._layers(sizes.large, sizes.seq, other)
        if best == "dawn":  # with all checks that strangers' shaders would get
            name = f"bench-{sizes.small}-{sizes.seq}-{best}-checked"
            yield self._bench(sizes.small, sizes.seq, best, name=name, QLORA_WGPU_CHECKS="1")
        for backend in self._backends:
            yield self._layers(sizes.small, sizes.long, backend)
            yield self._layers(sizes.large, sizes.long, backend)

    def _explorers(self) -> Iterator[Part]:
        """Every way to write the kernels on matrix units, which Dawn alone has."""
        minutes = _EXPLORING / 60 - 0.25
        for script in _EXPLORERS if "dawn" in self._backends else ():
            command = [sys.executable, str(HERE / f"{script}.py"), "{out}"]
            command += ["--minutes", str(minutes), "--registers", str(REGISTERS)]
            command += ["--small"] if self._sizes.software else []
            name = script.replace("_", "-")
            yield Part(name, command, _EXPLORING, 60, rows=True, needs="device-dawn")

    def _checks(self, name: str, backend: str, together: str, *options: str) -> Part:
        chosen = ["--check", *self._sizes.checks] if self._sizes.checks else []
        options = (*options, *chosen)
        return self._script("checks", name, backend, *options, seconds=150, together=together)

    def _torch(self) -> Part:
        software = ["--software"] if self._sizes.software else []
        return Part("torch", [self._peft, str(HERE / "gpu_torch.py"), "{out}", *software], 90, 15)

    def _script(
        self, script: str, name: str, backend: str, *options: str, seconds: float = 120,
        together: str = "",
    ) -> Part:  # fmt: skip
        command = [sys.executable, str(HERE / f"gpu_{script}.py"), "{out}", *options]
        needs = "" if name.startswith("device-") else f"device-{backend}"
        return Part(
            name, [*command, "--backend", backend], seconds, together=together, rows=True,
            needs=needs,
        )  # fmt: skip

    def _layers(self, shape: str, seq: int, backend: str) -> Part:
        name, options = f"layers-{shape}-{seq}-{backend}", (shape, "--seq", str(seq))
        return self._script("layers", name, backend, *options, seconds=60)

    def _others(self, shape: str, backend: str, *kinds: str) -> Part:
        sizes, name = self._sizes, f"others-{shape}-{'-'.join(kinds)}-{backend}"
        options = ["--seq", str(sizes.seq), "--steps", str(sizes.steps)]
        options += ["--texts", *map(str, sizes.texts), "--only", *kinds]
        return self._script("others", name, backend, shape, *options, seconds=150)

    def _with_states(self, backend: str) -> Part:
        """Steps of a model whose every other layer is linear attention, the delta rule's."""
        hidden, mlp, layers, heads, kv_heads, vocab, head_dim, states, state_heads = (
            self._sizes.states
        )
        config = {
            "model_type": "qwen3_5_text", "hidden_size": hidden, "intermediate_size": mlp,
            "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocab, "head_dim": head_dim,
            "attn_output_gate": True, "full_attention_interval": 2, "tie_word_embeddings": True,
            "linear_key_head_dim": states, "linear_value_head_dim": states,
            "linear_num_key_heads": state_heads, "linear_num_value_heads": state_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                                "partial_rotary_factor": 0.25},
        }  # fmt: skip
        file = self._models / "states.json"
        file.write_text(json.dumps(config), encoding="utf-8")
        name = f"bench-states-{self._sizes.seq}-{backend}"
        return self._bench(str(file.resolve()), self._sizes.seq, backend, name=name)

    def _least(self, shape: str) -> float:
        return self._sizes.least * (1 + (shape == self._sizes.large))

    def _attention(self, backend: str) -> Part:
        sizes = self._sizes
        options = ["--heads", str(sizes.heads[0]), "--kv-heads", str(sizes.heads[1])]
        options += ["--head-dim", *map(str, sizes.head_dims), "--seq", *map(str, sizes.attention)]
        return self._script("attention", f"attention-{backend}", backend, *options)

    def _bench(
        self, shape: str, seq: int, backend: str, *options: str, name: str = "",
        seconds: float = 180, **environment: str,
    ) -> Part:  # fmt: skip
        own = "".join(option.replace("--", "-") for option in options)
        command = [sys.executable, "-m", "qlora_wgpu", "bench", shape, "--seq", str(seq), *options]
        command += ["--steps", str(self._sizes.steps), "--backend", backend, "--json", "{out}.json"]
        name = name or f"bench-{shape}-{seq}{own}-{backend}"
        least = self._least(shape)
        return Part(name, command, seconds, least, environment, needs=f"device-{backend}")

    def _config(self, shape: str) -> str:
        """A config.json, of which peers make random weights."""
        file = self._models / f"{shape}.json"
        file.write_text(json.dumps(config_of(shape)), encoding="utf-8")
        return str(file.resolve())

    def _peer(self, shape: str, seq: int, *options: str) -> Part:
        own = "".join(option.replace("--", "-") for option in options)
        command = [*self._peft_step, self._config(shape)]
        command += ["--seq", str(seq), "--compute", "bfloat16", "--json", "{out}.json"]
        command += ["--steps", str(self._sizes.steps + 2), *options]
        least = self._least(shape)
        return Part(f"peft-{shape}-{seq}{own}", command, 180, least, needs="torch")

    def _rivals(self, shape: str, backend: str, *, compiled: bool = False) -> Part:
        """Steps in turns; torch.compile's are a part of their own, since they begin late."""
        sizes, (rounds, steps, busy) = self._sizes, self._sizes.turns
        name = f"rivals-{shape}{'-compiled' if compiled else ''}-{backend}"
        rivals = ("peft-compile", "peft-compile-graphs") if compiled else _AT_ONCE
        folder = str((self._models / f"{shape}-nf4").resolve())
        options = ["--peft", self._peft, "--folder", folder, "--only", *rivals]
        options += ["--works", *(sizes.compiled if compiled else sizes.works)]
        options += ["--patience", str(_COMPILING if compiled else _PATIENCE)]
        options += ["--rounds", str(rounds), "--steps", str(steps), "--busy", str(busy)]
        part = self._script("rivals", name, backend, shape, *options, seconds=_TURNS_SECONDS)
        return replace(part, least=self._least(shape))

    def _generation(self, shape: str) -> Part:
        """New tokens of transformers, beside those of gpu_others.py."""
        script = str(HERE / "peers" / "transformers_generate.py")
        command = [self._peft, script, self._config(shape)]
        command += ["--batch", *map(str, self._sizes.texts), "--compute", "bfloat16"]
        # In NF4 bitsandbytes takes not every size on a processor.
        software = ["--device", "cpu", "--tokens", "4", "--quant", "none"]
        command += software if self._sizes.software else ["--device", "cuda"]
        command += ["--repeats", str(self._sizes.turns[0]), "--json", "{out}.json"]
        return Part(f"generation-{shape}", command, 150, self._least(shape), needs="torch")

    def _losses(self, name: str, step: list[str]) -> Part:
        """First losses on the weights that all others read, too; the peer's are exact ones."""
        shape, exact = self._sizes.beside, name == "peft"
        folder = str((self._models / shape).resolve())
        command = [sys.executable, str(HERE / "gpu_agreement.py"), "{out}", folder, shape, "--"]
        command += [*step, "--seq", "128", "--steps", "4"]
        command += ["--compute", "float32" if exact else "bfloat16"]
        return Part(
            f"losses-{name}", command, 120, 20, {"QLORA_WGPU_BACKEND": name},
            needs="torch" if exact else f"device-{name}",
        )  # fmt: skip

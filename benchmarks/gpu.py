"""All that a GPU machine can tell, in three calls that may be cut off and gone on with.

usage: python benchmarks/gpu.py FOLDER --call 1|2|3 [--archive FILE] [--peft PYTHON]
           [--minutes N] [--again NAME ...] [--small]

FOLDER keeps the state, whole logs and results; FILE (FOLDER.tar.gz unless named) is an archive of
it, written anew after every part, and where FOLDER is not there it is unpacked from FILE. The same
command again goes on with what is left: what is done is not repeated, unless --again names it by
the beginning of its name. benchmarks/README.md says what to carry to a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpu_session import Part, Session
from gpu_summary import summary, written
from shapes import config_of

HERE = Path(__file__).parent
_SHARDS = 4  # processes that check a backend's kernels at once
BACKENDS = {"dawn": "wgpudawn", "wgpu": "wgpu"}  # with their packages, the faster one first
TORCH_CEILINGS = """
import json, sys, time, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
n = 8192 if device == "cuda" else 512
def seconds(work, rounds=10):
    for _ in range(3): work()
    wait(); begin = time.perf_counter()
    for _ in range(rounds): work()
    wait()
    return (time.perf_counter() - begin) / rounds
def rate(dtype):
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in "ab")
    return 2 * n**3 / seconds(lambda: a @ b)
if device == "cuda": torch.backends.cuda.matmul.allow_tf32 = False
big = torch.zeros(n * n, device=device)
found = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    "float32_flops": rate(torch.float32), "bfloat16_flops": rate(torch.bfloat16),
    "copy_bytes": 8 * big.numel() / seconds(big.clone)}
print(json.dumps(found)); open(sys.argv[1] + ".json", "w").write(json.dumps(found))
"""


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
    texts: tuple[int, ...] = (1, 4, 16)
    least: float = 40.0


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

    def parts(self, call: int) -> list[Part]:
        calls = {1: self._first, 2: self._second, 3: self._third}
        return list(calls[call]())

    def devices(self) -> list[Part]:
        """What all others need, whichever call comes first."""
        return [
            self._script("probe", f"device-{backend}", backend, "--only", "device")
            for backend in self._backends
        ]

    def leave_out_what_opens_nothing(self, session: Session) -> None:
        """Measures with the backends that open the GPU; a driver may be too old for Dawn's."""
        opened = [name for name in self._backends if session.is_done(f"device-{name}")]
        self._backends = opened or self._backends

    def _first(self) -> Iterator[Part]:
        sizes = self._sizes
        yield Part("doctor", [sys.executable, "-m", "qlora_wgpu", "doctor"], 60, 5)
        for backend in self._backends:
            for shard in range(_SHARDS):
                options = ["--shard", f"{shard}/{_SHARDS}", "--check", *sizes.checks]
                yield self._script(
                    "checks", f"checks-{backend}-{shard}", backend, *options, seconds=150,
                    together="checks",
                )  # fmt: skip
        for backend in self._backends:
            yield self._script("probe", f"ceilings-{backend}", backend, "--only", "ceilings")
        yield Part("torch-ceilings", [self._peft, "-c", TORCH_CEILINGS, "{out}"], 60, 10)
        for backend in self._backends:
            yield self._bench(sizes.small, sizes.seq, backend)
        for shape in (sizes.small, sizes.large):
            for backend in self._backends:
                yield self._layers(shape, sizes.seq, backend)
                if shape == sizes.small:
                    yield self._attention(backend)

    def _second(self) -> Iterator[Part]:
        sizes, best = self._sizes, self._backends[0]
        yield self._peer(sizes.small, sizes.seq)
        yield self._bench(sizes.small, sizes.seq, best, "--tune")
        yield self._peer(sizes.large, sizes.seq)
        yield self._bench(sizes.large, sizes.seq, best, "--tune", seconds=240)
        yield self._peer(sizes.small, sizes.seq, "--batch", "4")
        yield self._bench(sizes.small, sizes.seq, best, "--batch", "4")
        yield self._peer(sizes.large, sizes.long, "--checkpointing")
        yield self._bench(sizes.large, sizes.long, best, "--checkpointing", seconds=240)
        for kinds in (("texts", "dpo"), ("budget",)):
            yield self._others(sizes.small, best, *kinds)
        yield self._others(sizes.large, best, "texts")
        yield self._with_states(best)
        yield self._peer(sizes.beside, sizes.seq)
        yield self._bench(sizes.beside, sizes.seq, best)
        yield from self._agreement()

    def _third(self) -> Iterator[Part]:
        sizes = self._sizes
        spread = ["-n", "4"] if find_spec("xdist") else []
        for number, paths in enumerate(sizes.tests):
            for backend in self._backends:
                command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider"]
                yield Part(
                    f"tests-{number}-{backend}", [*command, *spread, *paths.split()], 240, 20,
                    {"QLORA_WGPU_BACKEND": backend}, needs=f"device-{backend}",
                )  # fmt: skip
        if "wgpu" in self._backends:
            yield self._bench(sizes.large, sizes.seq, "wgpu", seconds=240)
        for backend in self._backends:
            if backend == "dawn":  # with all checks that strangers' shaders would get
                name = f"bench-{sizes.small}-{sizes.seq}-{backend}-checked"
                yield self._bench(sizes.small, sizes.seq, backend, name=name, QLORA_WGPU_CHECKS="1")
            yield self._layers(sizes.small, sizes.long, backend)
            yield self._layers(sizes.large, sizes.long, backend)

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
        return self._script("layers", name, backend, *options)

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
        file.write_text(json.dumps(config))
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

    def _peer(self, shape: str, seq: int, *options: str) -> Part:
        own = "".join(option.replace("--", "-") for option in options)
        config = self._models / f"{shape}.json"
        config.write_text(json.dumps(config_of(shape)))
        command = [*self._peft_step, str(config.resolve())]
        command += ["--seq", str(seq), "--compute", "bfloat16", "--json", "{out}.json"]
        command += ["--steps", str(self._sizes.steps + 2), *options]
        return Part(f"peft-{shape}-{seq}{own}", command, 180, self._least(shape))

    def _agreement(self) -> Iterator[Part]:
        shape = self._sizes.beside
        folder = str((self._models / shape).resolve())
        ours = [sys.executable, str(HERE / "peers" / "ours_step.py")]
        peers = dict.fromkeys(self._backends, ours)
        peers["peft"] = self._peft_step
        for name, peer in peers.items():
            command = [sys.executable, str(HERE / "gpu_agreement.py"), "{out}", folder, shape, "--"]
            command += [*peer, "--seq", "128", "--steps", "4", "--compute", "bfloat16"]
            yield Part(
                f"losses-{name}", command, 120, 20, {"QLORA_WGPU_BACKEND": name},
                needs=f"device-{name}" if name in self._backends else "",
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--call", type=int, required=True, choices=[1, 2, 3])
    parser.add_argument("--archive", type=Path)
    parser.add_argument("--peft", help="Python with torch, PEFT and bitsandbytes")
    parser.add_argument("--minutes", type=float, default=4.75, help="when to end, at the latest")
    parser.add_argument("--again", nargs="*", default=[], help="parts to measure anew")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    args = parser.parse_args()
    folder = args.folder.resolve()
    archive = args.archive or folder.with_name(f"{folder.name}.tar.gz")
    session = Session(folder, archive.resolve(), args.minutes)
    session.forget(args.again)
    # What is timed and checked once is known in the next call.
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    # The code beside this script is measured, whatever wheel of the project gives its metadata.
    searched = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parent), *([searched] if searched else [])]
    )
    peft = args.peft or sys.executable
    backends = [name for name, package in BACKENDS.items() if find_spec(package)]
    calls = Calls(SMALL if args.small else Sizes(), session, backends, peft)
    session.run(calls.devices())
    calls.leave_out_what_opens_nothing(session)
    session.run(calls.parts(args.call))
    if args.call == 3:  # what failed or was left out before
        session.run([*calls.parts(1), *calls.parts(2)])
    figures = summary(folder)
    (folder / "summary.json").write_text(json.dumps(figures, indent=1) + "\n")
    text = written(figures)
    (folder / "summary.txt").write_text(text)
    session.close()
    print(text)


if __name__ == "__main__":
    main()

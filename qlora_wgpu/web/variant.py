"""A model with an adapter of one rank, as files for the page: buffers, weights, plans."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.data.batches import bucket_length
from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import ALIGNMENT, buffer_bytes
from qlora_wgpu.gpu.preprocessor import without_comments
from qlora_wgpu.gpu.recording_device import RecordedBuffer, RecordingDevice
from qlora_wgpu.gpu.wgsl import Shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.sharded_vector import ShardedVector
from qlora_wgpu.graph.submission import parts_needed, split_grid
from qlora_wgpu.graph.tensor import Storage, Tensor, vector
from qlora_wgpu.limits import MIB
from qlora_wgpu.lora.config import to_json
from qlora_wgpu.lora.peft_names import MAGNITUDE
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.programs import LogitsPrograms
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.training.optimizer import STEP_NUMBERS, trace_update

# ---- files ---------------------------------------------------------------------------------------

FILE_BYTES = 64 * MIB  # of weights: static hosts refuse larger ones
_ALIGNMENT = 4  # of the ranges that a queue writes


class SiteFiles:
    """The files of a site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listed: dict[str, dict[str, Any]] = {}  # size and SHA-256 of each file, by name

    def put(self, name: str, content: bytes) -> str:
        """Writes a file and returns its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.listed[name] = {"bytes": len(content), "sha256": digest}
        return name

    def put_json(self, name: str, value: Any) -> str:
        """Writes gzipped JSON, since servers may not compress."""
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        return self.put(name, gzip.compress(text.encode(), mtime=0))


class WeightFiles:
    """The contents of buffers, deduplicated, in files of bounded size."""

    def __init__(self, files: SiteFiles) -> None:
        self._files = files
        self._names: list[str] = []
        self._content = bytearray()
        self._places: dict[bytes, list[list[int]]] = {}

    def put(self, data: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Adds bytes; returns where they are, as a list of ``[file, first byte, bytes]``."""
        key = hashlib.sha256(data.tobytes()).digest()
        if key not in self._places:
            self._places[key] = self._added(data)
        return self._places[key]

    def end(self) -> list[str]:
        """Writes the last file; returns the names of all."""
        self._write()
        return self._names

    def _added(self, data: npt.NDArray[np.uint8]) -> list[list[int]]:
        places, begin = [], 0
        while begin < data.size:
            if len(self._content) >= FILE_BYTES:
                self._write()
            piece = data[begin : begin + FILE_BYTES - len(self._content)]
            places.append([len(self._names), len(self._content), piece.size])
            self._content += piece.tobytes()
            self._content += bytes(-len(self._content) % _ALIGNMENT)
            begin += piece.size
        return places

    def _write(self) -> None:
        if self._content:
            name = f"weights/{len(self._names):03d}.bin"
            self._names.append(self._files.put(name, bytes(self._content)))
            self._content = bytearray()


# ---- plans ---------------------------------------------------------------------------------------


class Needs:
    """The memory that plans need which run one at a time."""

    def __init__(self) -> None:
        self.slots: list[int] = []  # sizes that fit all plans, the largest first
        self._buffers: set[int] = set()
        self._parameters = 0

    def add(self, plan: dict[str, Any]) -> None:
        """Adds a plan, as ``plan_json`` writes it."""
        sizes = sorted(plan["slots"], reverse=True)
        self.slots = [max(pair) for pair in zip_longest(self.slots, sizes, fillvalue=0)]
        launches = plan["launches"]
        self._buffers |= {w[1] for launch in launches for w in launch[2] if w[1] >= 0}
        # The page allocates a buffer for the parameters of a plan, even if there are none.
        self._parameters += ALIGNMENT * max(sum(bool(launch[3]) for launch in launches), 1)

    def nbytes(self, sizes: Sequence[int], also: Iterable[int]) -> int:
        """Bytes of buffers, slots and parameters."""
        buffers = self._buffers.union(also)
        pooled = sum(map(buffer_bytes, self.slots))
        return sum(sizes[number] for number in buffers) + pooled + self._parameters


# Windows kills work after two seconds; on a slow GPU, a launch takes a quarter of that.
_MAX_SECONDS = 0.5
_SLOW = CostModel.of_kind("IntegratedGPU", _MAX_SECONDS)


class Shaders:
    """The shaders of a site's plans, without duplicates."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._shaders: list[Shader] = []
        self.max_bindings = 0  # storage buffers of a shader

    def number(self, launch: Launch) -> int:
        """The index of a launch's shader, which is added if it is new."""
        shader = launch.shader
        if shader.label not in self._numbers:
            self._numbers[shader.label] = len(self._shaders)
            self._shaders.append(shader)
            self.max_bindings = max(self.max_bindings, len(launch.tensors))
        return self._numbers[shader.label]

    @property
    def max_invocations(self) -> int:
        """Maximum number of invocations per workgroup."""
        return max(int(np.prod(shader.workgroup_size)) for shader in self._shaders)

    def as_json(self) -> list[dict[str, str]]:
        """Label and source of each shader, in order."""
        return [{"label": s.label, "code": _compact(s.code)} for s in self._shaders]


def _compact(code: str) -> str:
    """Code without comments and blank lines, which are a third of it."""
    lines = (line.strip() for line in without_comments(code).splitlines())
    return "\n".join(line for line in lines if line)


def plan_json(plan: Plan, shaders: Shaders, device: Device) -> dict[str, Any]:
    """A plan as JSON values; its buffers are allocated on a recording device.

    A launch is ``[shader, [x, y, z], windows, parameters, microseconds]``. A window is ``[binding,
    memory, first byte, bytes]``, where memory is a buffer's number, or -1 - n for the n-th slot.
    Parameters are the words of the uniform. The time is estimated for a slow GPU; the page sizes
    its first submits by it.
    """
    for storage in plan.storages:
        allocate(device, storage)
    return {
        "slots": list(plan.slots),
        "launches": [
            [
                shaders.number(part),
                list(part.workgroups),
                [list(window) for window in _windows(plan, part)],
                np.frombuffer(part.params, np.uint32).tolist(),
                round(1e6 * _SLOW.seconds(part.path, part.flops, part.nbytes)),
            ]
            for launch in plan.launches
            for part in _parts(launch)
        ],
    }


def window_json(plan: Plan, tensor: Tensor) -> list[int]:
    """Where a tensor is: ``[memory, first byte, bytes]``."""
    if tensor.storage is not None:
        memory, first = tensor.storage.whole.buffer.number, tensor.storage.first_byte
        return [memory, first + tensor.offset, tensor.nbytes]
    return [-1 - plan.slot_of[tensor], 0, tensor.nbytes]


def _windows(plan: Plan, launch: Launch) -> Iterator[tuple[int, ...]]:
    for name, tensor in launch.tensors.items():
        yield launch.shader.bindings[name].index, *window_json(plan, tensor)


def _parts(launch: Launch) -> list[Launch]:
    """The launch, or parts of its grid if it would take too long on a slow GPU."""
    seconds = _SLOW.seconds(launch.path, launch.flops, launch.nbytes)
    count = parts_needed(seconds, _MAX_SECONDS) if launch.has_parts else 1
    if count == 1:
        return [launch]
    return [launch.part(*box) for box in split_grid(launch.workgroups, count)]


# ---- the variant ---------------------------------------------------------------------------------

VECTORS = ("parameters", "gradient", "first_moment", "second_moment")
_FIELDS = ("input_ids", "targets", "label_rows", "positions", "segments", "info")


class FilledBuffers:
    """The initial contents of buffers."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self.pieces: list[list[int]] = []

    def fill(self, buffer: RecordedBuffer, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Records ``[buffer, first byte, file, its first byte, bytes]``; zeros need no record."""
        if not data.any():
            return
        for file, begin, nbytes in self._weights.put(data):
            self.pieces.append([buffer.number, offset, file, begin, nbytes])
            offset += nbytes


class Variant:
    """Writes the files of a model with one rank and tiling."""

    def __init__(
        self, model: QLoRAModel, device: RecordingDevice, shaders: Shaders, files: SiteFiles,
        folder: str,
    ) -> None:  # fmt: skip
        self._model, self._device = model, device
        self._shaders, self._files, self._folder = shaders, files, folder
        self._needs: dict[int, Needs] = {}
        self._used: set[int] = set()

    def write(
        self, optim: OptimConfig, batch: int, buckets: Sequence[int], filled: FilledBuffers
    ) -> dict[str, Any]:
        """Writes all files; returns the variant's entry in the site's manifest."""
        self._needs = {length: Needs() for length in buckets}
        update, info = self._update(optim)
        steps = {n: self._steps(batch, n) for n in sorted(buckets, reverse=True)}
        text = self._text(max(buckets))
        start = self._start()
        update_json = self._json(0, update)
        model = self._model
        variant = {
            "adapter": self._adapter(),
            "stats": window_json(update, model.stats),
            "step_info": window_json(update, info),
            "update": update_json,
            "start": start,
            "steps": {str(n): name for n, name in steps.items()},
            "text": text,
            "shaders": sorted(self._used),
            # Complete only after all plans are traced
            "buffers": [[b.label, b.kind, b.nbytes] for b in self._device.buffers],
            "filled": filled.pieces,
            "slots": self._needs[max(buckets)].slots,
        }
        name = self._files.put_json(f"{self._folder}/variant.plan", variant)
        return {
            "rank": model.adapter.config.r,
            "file": name,
            "memory": {str(n): self._bytes(n, variant) for n in sorted(buckets)},
            "largest_slot": max(self._needs[max(buckets)].slots),
        }

    def _json(self, length: int, plan: Plan) -> dict[str, Any]:
        """A plan as JSON; it is needed for rows of this length and longer ones."""
        written = plan_json(plan, self._shaders, self._device)
        self._used |= {launch[0] for launch in written["launches"]}
        for longest, needs in self._needs.items():
            if length <= longest:
                needs.add(written)
        return written

    def _update(self, optim: OptimConfig) -> tuple[Plan, Any]:
        model = self._model
        info = vector(
            "step_info", STEP_NUMBERS, "float32", Storage("step info", "inputs", 4 * STEP_NUMBERS)
        )
        graph = model.layout.new_graph()
        model.adapter.keep_moments(optim.name)
        trace_update(graph, model.adapter, model.stats, info, optim)
        plan = compile_plan(graph)
        for storage in plan.storages:
            allocate(self._device, storage)
        return plan, info

    def _steps(self, batch: int, length: int) -> str:
        """Writes the steps for rows of a length."""
        found: dict[str, Any] = {}
        for kind in ("train", "loss"):
            step = self._model.layout.step(self._model.options.step(kind, batch, length))
            found[kind] = self._json(length, step.plan)
            found[kind]["batch"] = _batch_json(step.batch, step.plan)
        return self._files.put_json(f"{self._folder}/steps-{length}.plan", found)

    def _text(self, capacity: int) -> str:
        """Writes the programs of generation: for prompts of each length, and for one token."""
        cache, lengths = KVCache(capacity), {1}
        lengths |= {max(bucket_length(n, capacity), 2) for n in range(1, capacity + 1)}
        programs = {}
        for length in sorted(lengths):
            made = self._model.programs.logits(make_batch_buffers(1, length, CacheView(cache)))
            programs[str(length)] = self._logits(made)
        whole = {"capacity": capacity, "programs": programs}
        return self._files.put_json(f"{self._folder}/text.plan", whole)

    def _logits(self, made: LogitsPrograms) -> dict[str, Any]:
        hidden, head = made.hidden.plan, made.head.plan
        return {
            "hidden": self._json(0, hidden),
            "head": self._json(0, head),
            "logits": window_json(head, made.logits),
            "batch": _batch_json(made.batch, hidden),
        }

    def _start(self) -> list[dict[str, Any]]:
        """Programs that compute DoRA's initial magnitudes: the norms of the base's rows."""
        adapter, found = self._model.adapter, []
        for name in adapter.loras if adapter.config.use_dora else ():
            graph, norms = norms_graph(self._model.layout, name)
            plan = compile_plan(graph, (norms,))
            piece, offset = adapter.parameters.find(adapter.place(name, MAGNITUDE).offset)
            assert piece.storage is not None
            found.append({
                "program": self._json(0, plan),
                "from": window_json(plan, norms),
                "to": [piece.storage.buffer.number, 4 * offset],
            })  # fmt: skip
        return found

    def _adapter(self) -> dict[str, Any]:
        adapter = self._model.adapter
        named = self._model.name_or_path  # local paths are private
        base = named if name_on_hub(named) else None
        config = replace(adapter.peft, base_model_name_or_path=base)
        places = dict(adapter)
        return {
            "length": adapter.length,
            "tensors": {n: [p.offset, p.rows, p.columns] for n, p in places.items()},
            "config": to_json(config),
            **{name: _pieces(getattr(adapter, name)) for name in VECTORS},
        }

    def _bytes(self, length: int, variant: dict[str, Any]) -> int:
        """GPU memory for training on rows up to a length."""
        made = {piece[0] for piece in variant["filled"]}
        made |= {number for name in VECTORS for number, _ in variant["adapter"][name]}
        made |= {variant["stats"][0], variant["step_info"][0]}
        return self._needs[length].nbytes([b.nbytes for b in self._device.buffers], made)


def _pieces(vector: ShardedVector) -> list[list[int]]:
    """``[buffer, elements]`` of each piece of a vector."""
    storages = zip(vector.storages, vector.shards, strict=True)
    return [[storage.buffer.number, piece.columns] for storage, piece in storages]


def _batch_json(batch: BatchBuffers, plan: Plan) -> dict[str, Any]:
    """Where the inputs of a micro-batch are written."""
    fields = {name: getattr(batch, name).offset for name in _FIELDS}
    return {
        "buffer": batch.storage.whole.buffer.number,
        "bytes": batch.storage.nbytes,
        "batch": batch.batch,
        "seq": batch.seq,
        **fields,
    }

"""A model with an adapter of one rank, as a page trains it: buffers, plans, places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qlora_wgpu.checkpoint.hub import name_on_hub
from qlora_wgpu.config import OptimConfig
from qlora_wgpu.data.batches import bucket_length
from qlora_wgpu.gpu.recording_device import RecordedBuffer, RecordingDevice
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.graph.program import allocate
from qlora_wgpu.graph.sharded_vector import Pieces
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.lora.config import to_json
from qlora_wgpu.lora.peft_names import MAGNITUDE
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.programs import LogitsPrograms
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.ops.batch import BatchBuffers, make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.training.optimizer import trace_update
from qlora_wgpu.training.schedule import STEP_NUMBERS
from qlora_wgpu.web.page_memory import Needs
from qlora_wgpu.web.plan_json import Shaders, plan_json, window_json
from qlora_wgpu.web.site_files import SiteFiles, WeightFiles

VECTORS = ("parameters", "gradient", "first_moment", "second_moment")
_FIELDS = ("input_ids", "targets", "label_rows", "positions", "segments", "info")


class FilledBuffers:
    """What buffers are filled with before a page computes, by their numbers."""

    def __init__(self, weights: WeightFiles) -> None:
        """Nothing yet."""
        self._weights = weights
        self.pieces: list[list[int]] = []

    def fill(self, buffer: RecordedBuffer, offset: int, data: npt.NDArray[np.uint8]) -> None:
        """Notes where bytes come from: ``[buffer, first byte, file, its first byte, bytes]``.

        A buffer is zero where nothing is written.
        """
        if not data.any():
            return
        for file, begin, nbytes in self._weights.put(data):
            self.pieces.append([buffer.number, offset, file, begin, nbytes])
            offset += nbytes


class Variant:
    """Writes one model's files."""

    def __init__(
        self, model: QLoRAModel, device: RecordingDevice, shaders: Shaders, files: SiteFiles,
        folder: str,
    ) -> None:  # fmt: skip
        """Takes a model whose weights are recorded already.

        Args:
            model: Base and adapter.
            device: Its device.
            shaders: Those of the site.
            files: Where its files go.
            folder: Where within them.
        """
        self._model, self._device = model, device
        self._shaders, self._files, self._folder = shaders, files, folder
        self._needs: dict[int, Needs] = {}
        self._used: set[int] = set()

    def write(
        self, optim: OptimConfig, batch: int, buckets: Sequence[int], filled: FilledBuffers
    ) -> dict[str, Any]:
        """Writes all files of the variant.

        Args:
            optim: The optimizer.
            batch: Rows of a micro-batch.
            buckets: Lengths of rows.
            filled: What the device's buffers are filled with.

        Returns:
            What the site says of it: rank, file, memory in bytes by length of rows.
        """
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
            # All are known by now.
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
        """A plan, which is needed where rows have this length or a greater one."""
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
        graph = model.new_graph()
        model.adapter.keep_moments(optim.name)
        trace_update(graph, model.adapter, model.stats, info, optim)
        plan = make_plan(graph)
        for storage in plan.storages:
            allocate(self._device, storage)
        return plan, info

    def _steps(self, batch: int, length: int) -> str:
        """The file of the steps on rows of a length."""
        found: dict[str, Any] = {}
        for kind in ("train", "loss"):
            step = self._model.layout.step(self._model.options.step(kind, batch, length))
            found[kind] = self._json(length, step.plan)
            found[kind]["batch"] = _batch_json(step.batch, step.plan)
        return self._files.put_json(f"{self._folder}/steps-{length}.plan", found)

    def _text(self, capacity: int) -> str:
        """The file of the programs that write: for prompts of each length, and for one token."""
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
        """What computes the parts of the adapter's start that follow from the base's weights.

        They are DoRA's magnitudes: the norms of each layer's rows, and where they go.
        """
        adapter, found = self._model.adapter, []
        for name in adapter.loras if adapter.config.use_dora else ():
            graph, norms = norms_graph(self._model.layout, name)
            plan = make_plan(graph, (norms,))
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
        named = self._model.name_or_path  # a folder's is the user's own affair
        base = named if name_on_hub(named) else None
        config = replace(adapter.peft, base_model_name_or_path=base)
        places = {name: adapter.placed(name) for name in adapter.names}
        return {
            "length": adapter.length,
            "tensors": {n: [p.offset, p.rows, p.columns] for n, p in places.items()},
            "config": to_json(config),
            **{name: _pieces(getattr(adapter, name)) for name in VECTORS},
        }

    def _bytes(self, length: int, variant: dict[str, Any]) -> int:
        """All bytes of a device that a page takes which trains on rows up to a length."""
        made = {piece[0] for piece in variant["filled"]}
        made |= {number for name in VECTORS for number, _ in variant["adapter"][name]}
        made |= {variant["stats"][0], variant["step_info"][0]}
        return self._needs[length].nbytes([b.nbytes for b in self._device.buffers], made)


def _pieces(vector: Pieces) -> list[list[int]]:
    """Buffer and elements of each piece of a vector."""
    storages = zip(vector.storages, vector.pieces, strict=True)
    return [[storage.buffer.number, piece.columns] for storage, piece in storages]


def _batch_json(batch: BatchBuffers, plan: Plan) -> dict[str, Any]:
    """Where a micro-batch's inputs are written."""
    fields = {name: getattr(batch, name).offset for name in _FIELDS}
    return {
        "buffer": batch.storage.whole.buffer.number,
        "bytes": batch.storage.nbytes,
        "batch": batch.batch,
        "seq": batch.seq,
        **fields,
    }

"""Whether a driver computes what a run launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qlora_wgpu.config import Config
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import make_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.ops.batch import make_batch_buffers
from qlora_wgpu.ops.kv_cache import CacheView, KVCache
from qlora_wgpu.selfcheck import ensure_sound
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.optimizer import trace_update
from qlora_wgpu.training.schedule import STEP_NUMBERS

_TEXT = 64  # tokens: the shaders of a text do not depend on its length


def check_driver(
    device: Device,
    open_device: Callable[[], Device],
    settings: Config,
    layout: ModelLayout,
    length: int,
    observer: Observer,
) -> None:
    """Checks the kernels of a run the first time that a driver meets them.

    Args:
        device: What the run will use.
        open_device: Opens the same GPU once more.
        settings: The run's.
        layout: The run's model, cut for the device.
        length: Tokens of its longest row.
        observer: Who is told.

    Raises:
        DeviceError: If the driver computes wrongly.
    """
    launches = run_launches(settings, layout, length)
    ensure_sound(device, open_device, layout.new_graph(), launches, observer.activity)
    observer.activity("")


def run_launches(settings: Config, layout: ModelLayout, length: int) -> Iterator[Launch]:
    """All that a run launches: steps, evaluations, updates and texts."""
    options, rows = training_options(settings.train), settings.train.per_device_train_batch_size
    for kind in ("train", "loss"):
        yield from layout.step(options.step(kind, rows, length)).plan.launches
    yield from _update(settings, layout)
    cache = KVCache(_TEXT)
    for tokens in (_TEXT, 1):
        batch = make_batch_buffers(1, tokens, CacheView(cache))
        hidden, head, logits = layout.logits_graphs(batch)
        yield from make_plan(hidden).launches
        yield from make_plan(head, (logits,)).launches
    if layout.adapter.config.use_dora:
        for name in layout.adapter.loras:
            graph, norms = norms_graph(layout, name)
            yield from make_plan(graph, (norms,)).launches


def _update(settings: Config, layout: ModelLayout) -> Iterator[Launch]:
    graph, storage = layout.new_graph(), Storage("step info", "inputs", 4 * STEP_NUMBERS)
    info = vector("step_info", STEP_NUMBERS, "float32", storage)
    trace_update(graph, layout.adapter, layout.stats, info, settings.optim)
    yield from make_plan(graph).launches

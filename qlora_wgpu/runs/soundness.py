"""A run's kernels, such as its driver computes rightly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from qlora_wgpu.config import Config
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.graph.tensor import Storage, vector
from qlora_wgpu.model.adapter_state import norms_graph
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.model.steps import StepKind
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.preference import Preference
from qlora_wgpu.runs.text_plans import text_plans
from qlora_wgpu.selfcheck import give_way, problem_of, unsound
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.training.optimizer import trace_update
from qlora_wgpu.training.schedule import STEP_NUMBERS

VERIFY_VARIABLE = "QLORA_WGPU_VERIFY_DRIVER"
_TEXT = 64  # tokens: the shaders of a text do not depend on its length


def sound_layout(
    device: Device,
    open_device: Callable[[], Device],
    launches_of: Callable[[ModelLayout], Iterator[Launch]],
    layout: ModelLayout,
    observer: Observer,
) -> ModelLayout:
    """A run's model laid out in kernels that the driver computes rightly.

    They are checked the first time that a driver meets them, unless the environment's
    ``QLORA_WGPU_VERIFY_DRIVER`` is 0. What it refuses or computes wrongly gives way to plainer
    kernels, which is told.

    Args:
        device: What the run will use; its profile is set.
        open_device: Opens the same GPU once more.
        launches_of: All that will be launched of a layout.
        layout: The run's model, cut for the device.
        observer: Who is told.

    Raises:
        DeviceError: If the driver computes the plainest kernels wrongly, too.
    """
    if os.environ.get(VERIFY_VARIABLE) == "0":
        return layout
    while True:
        graph, launches = layout.new_graph(), launches_of(layout)
        problem = problem_of(device, open_device, graph, launches, observer.activity)
        observer.activity("")
        if not problem:
            return layout
        profile = give_way(device)
        if profile is None:
            raise unsound(problem)
        observer.note(f"{problem}; {_instead(profile)} instead")
        layout = layout.cut_for(profile)


def _instead(profile: Profile) -> str:
    if profile.gemm_kind == "matrix":
        return "attention goes through workgroup memory"
    if profile.gemm_kind == "tiled":
        return "products go through workgroup memory"
    return "kernels without workgroup memory are used"


def run_launches(settings: Config, layout: ModelLayout, length: int) -> Iterator[Launch]:
    """All that a run launches: steps, evaluations, updates and texts."""
    options = training_options(settings.train, weighted=settings.data.has_weights)
    rows = settings.rows_at_once
    if layout.filling is not None:
        yield from layout.filling.launches
    for kind in _kinds(options.objective.preference):
        yield from layout.step(options.step(kind, rows, length)).plan.launches
    yield from update_launches(settings, layout)
    for plan in text_plans(layout, KVCache(_TEXT), ((1, _TEXT), (1, 1))):
        yield from plan.launches
    if layout.profile.textures and layout.copy_sizes.fits:
        yield from _strip_launches(layout.cut_for(layout.profile))
    if layout.adapter.config.use_dora:
        for name in layout.adapter.loras:
            graph, norms = norms_graph(layout, name)
            yield from make_plan(graph, (norms,)).launches


def _kinds(preference: Preference | None) -> list[StepKind]:
    """What a run's steps are of, those of an objective over answers with its reference's."""
    kinds: list[StepKind] = ["train", "loss"]
    if preference is not None and preference.has_reference:
        kinds.append("sums")
    if preference is not None and preference.has_divergence:
        kinds.append("divergence")
    return kinds


def _strip_launches(own: ModelLayout) -> Iterator[Launch]:
    """All that new tokens launch with copies of the weights, and what fills those.

    Args:
        own: A layout of its own: what the plans ask of its copies is never filled.
    """
    for plan in text_plans(own, KVCache(_TEXT, in_strips=True), ((1, 1),)):
        yield from plan.launches
    graph = own.new_graph()
    own.strips.fill(graph)
    yield from make_plan(graph).launches


def update_launches(settings: Config, layout: ModelLayout) -> Iterator[Launch]:
    """All that an update of the adapter launches."""
    yield from update_plan(settings, layout).launches


def update_plan(settings: Config, layout: ModelLayout) -> Plan:
    """An update of the adapter with its moments on the device."""
    graph, storage = layout.new_graph(), Storage("step info", "inputs", 4 * STEP_NUMBERS)
    info = vector("step_info", STEP_NUMBERS, "float32", storage)
    trace_update(graph, layout.adapter, layout.stats, info, settings.optim)
    return make_plan(graph)

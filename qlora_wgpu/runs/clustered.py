"""A run whose micro-batches are computed by the workers of a cluster: its owner's side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict

from qlora_wgpu.cluster.actor import Identity, Specification
from qlora_wgpu.cluster.computing import Cluster
from qlora_wgpu.config import ClusterConfig, Config
from qlora_wgpu.errors import ConfigError, OutOfMemoryError
from qlora_wgpu.gpu.adapters import cards
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.adapter_model import AdapterModel
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.runs.opening import OpenedModel, checking_device, verified_layout
from qlora_wgpu.runs.placement import limit_of
from qlora_wgpu.runs.settings import load_init_from
from qlora_wgpu.runs.worker import Worker
from qlora_wgpu.runs.workload import TrainingWorkload, owner_memory, update_plan
from qlora_wgpu.training import Observer, training_options
from qlora_wgpu.version import __version__


@contextmanager
def opened_cluster(
    settings: Config, source: OpenedModel, workload: TrainingWorkload, device: Device,
    observer: Observer,
) -> Iterator[tuple[AdapterModel, Cluster]]:  # fmt: skip
    """The adapter on the owner's device, and workers that have opened the base."""
    if settings.lora.changes_base:
        raise ConfigError(
            f"lora.init_lora_weights: {settings.lora.init_lora_weights} is not there on a cluster: "
            "train on one device, or take default"
        )
    folder = source.pretrained.folder
    assert folder is not None and workload.shapes is not None
    layout = _owner_layout(settings, workload, device, observer)
    folder.finish_fingerprint()
    gpus = _gpus(settings)
    shapes, shapes_of_run = layout.adapter.shapes, asdict(workload.shapes)

    def specify(name: str) -> Specification:
        own = gpus[int(name) % len(gpus)] if settings.cluster.scheduler == "local" else None
        length = workload.seq
        return Specification(settings.model_dump(), length, __version__, shapes_of_run, own)

    def check(identity: Identity) -> str | None:
        return _problem(identity, folder.fingerprint, shapes)

    observer.activity("connecting to workers")
    count = settings.cluster.workers
    processes = len(gpus) if count == "auto" else int(count)
    with closing(
        Cluster(settings.cluster, Worker, specify, check, observer.warning, processes=processes)
    ) as cluster:
        observer.activity("opening the model on workers")
        identities = cluster.wait_for(_least(settings.cluster, processes))
        observer.activity("")
        _tell(identities, settings.train.gradient_accumulation_steps, cluster, observer)
        options = training_options(settings.train, weighted=settings.data.has_weights)
        model = AdapterModel(layout, device, options=options)
        cluster.take(model)
        start = model.adapter.initial(settings.train.seed)
        if settings.lora.use_dora or model.adapter.trained_rows or model.adapter.trained_whole:
            start = start + cluster.neutral()
        model.write_parameters(start)
        load_init_from(model, settings.lora)
        yield model, cluster


def _owner_layout(
    settings: Config, workload: TrainingWorkload, device: Device, observer: Observer
) -> ModelPlan:
    """The adapter's layout, in kernels that the owner's driver computes rightly."""

    def launches(layout: ModelPlan) -> Iterator[Launch]:
        yield from update_plan(layout, workload.optim).launches

    layout = workload.layout(device)
    memory = owner_memory(layout, workload.optim)
    observer.planned(memory)
    _require_room(memory, device)
    layout = verified_layout(
        device, lambda: checking_device(settings.device), launches, layout, observer
    )
    layout.make_room_for_counts()
    return layout


def _require_room(memory: Counter[str], device: Device) -> None:
    """Sees that the owner's device has room, before workers are asked for."""
    limit, needed = limit_of(device), memory.total()
    if limit is not None and needed > limit:
        raise OutOfMemoryError(
            f"the owner of this run, which has the adapter, its gradients and its moments, takes "
            f"{needed / MIB:,.1f} MiB of device memory, {(needed - limit) / MIB:,.1f} MiB more "
            f"than the {limit / MIB:,.1f} MiB there are: lower lora.r, set optim.name to "
            "adamw_8bit, or raise device.memory"
        )


def _gpus(settings: Config) -> list[str]:
    """The GPUs that local workers take in turn: the one that is named, or all of this machine."""
    if settings.cluster.scheduler != "local":
        return []
    if settings.device.gpu != "auto":
        return [settings.device.gpu]
    return cards(settings.device.backend) or ["auto"]


def _least(settings: ClusterConfig, processes: int) -> int:
    """How many workers training begins with."""
    if settings.scheduler == "local":
        return processes
    return 1 if settings.workers == "auto" else int(settings.workers)


def _problem(
    identity: Identity, base: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> str | None:
    """A sentence about what is wrong with a worker; None where nothing is."""
    if identity.base["weights"] != base["weights"]:
        return "it has other base weights: bring the same model there, or name it with --model"
    if identity.base != base:
        return "its base has another config.json: bring the same model there"
    if identity.adapter != shapes:
        return "its adapter has other shapes, although the base is the same"
    return None


def _tell(
    identities: dict[str, Identity], blocks: int, cluster: Cluster, observer: Observer
) -> None:
    kinds: dict[str, list[str]] = {}
    for name, identity in identities.items():
        kinds.setdefault(identity.device, []).append(name)
    there = "; ".join(f"{', '.join(names)} on {device}" for device, names in kinds.items())
    noun = "worker" if len(identities) == 1 else "workers"
    observer.note(f"{len(identities)} {noun}: {there}")
    if blocks < len(identities):
        observer.note(
            f"a step has fewer micro-batches ({blocks}) than there are workers, so that some have "
            "nothing to do: set train.gradient_accumulation_steps to a multiple of their number"
        )
    if (link := cluster.dashboard) is not None:
        observer.note(f"Dask's dashboard is at {link}")

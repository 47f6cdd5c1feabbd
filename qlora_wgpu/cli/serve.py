"""``serve``: a model for clients of OpenAI's API, on this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._opening import ModelOptions, opening_options, prompt_format, require_template
from qlora_wgpu.cli._options import PORT, chat_template_option, counted
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError, reason
from qlora_wgpu.extras import require_extra
from qlora_wgpu.files import exists
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.limits import MIB
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import configs_of
from qlora_wgpu.runs.resolve import adapter_in
from qlora_wgpu.runs.workload import GenerationWorkload
from qlora_wgpu.serving.writer import GenerationWorker, ServedModel


@click.command()
@opening_options()
@click.argument("others", nargs=-1, metavar="[[NAME=]RUN]...")
@click.option("--port", default=8000, type=PORT, help="Port to listen on.")
@click.option("--name", help="The model's name for clients.", show_default="RUN's, or the model's")
@click.option(
    "--context", default=2048, type=counted(), help="Most tokens of a conversation and its answer."
)
@click.option(
    "--batch",
    default=4,
    type=counted(),
    help="How many answers are written at a time; others wait.",
)
@chat_template_option
def serve(
    opening: ModelOptions,
    others: tuple[str, ...],
    port: int,
    name: str | None,
    context: int,
    batch: int,
    template_name: str | None,
) -> None:
    """Serve what a run has trained to clients of OpenAI's API, on this machine's loopback address.

    RUN is a run's folder, such as runs/first, or an adapter's or a model's. The base URL for
    clients is http://127.0.0.1:8000/v1, and any key will do. Further runs, or adapters of the same
    base, are served beside it by their names, which requests choose by `model`.
    """
    require_extra("serve")
    console = Terminal(stderr=True)
    place = _listening(port)
    source = OpenedModel.open(opening.model)
    shown = name or _name_of(opening.adapter or opening.model)
    folders = {shown: opening.adapter, **_named(others, shown)}
    written = {
        each: require_template(prompt_format(source, folder, template_name))
        for each, folder in folders.items()
    }
    beside = [folder for each, folder in folders.items() if each != shown and folder is not None]
    texts = replace(
        GenerationWorkload.of(source.pretrained, context, 0, batch),
        others=configs_of(source, beside),
    )
    model = opening.load(console, source, texts)
    models = {shown: ServedModel(model.active_adapter, written[shown])}
    for each, folder in folders.items():
        if each != shown and folder is not None:
            inside = f"served as {each}"  # whatever the first one is called within the model
            model.load_adapter(folder, inside)
            models[each] = ServedModel(inside, written[each])
    if beside:
        console.print(_room_of(model))
    writer = GenerationWorker(Engine(model, batch, texts.capacity), model)
    names = ", ".join(models)
    console.print(f"{names} for clients at http://127.0.0.1:{port}/v1 until Ctrl-C")
    try:
        _run(models, writer, place)
    finally:
        writer.close()


def _room_of(model: QLoRAModel) -> str:
    """What the adapters take, beside one another."""
    adapters = list(model.adapters.values())
    configs = [adapter.config for adapter in adapters]
    each = [a.device_bytes for i, a in enumerate(adapters) if a.config not in configs[:i]]
    host = sum(adapter.host_bytes for adapter in adapters)
    return (
        f"{len(adapters)} adapters take {sum(each) / MIB:,.1f} MiB of the device and "
        f"{host / MIB:,.1f} MiB of host memory"
    )


def _listening(port: int) -> socket.socket:
    """A socket that is bound before the model is loaded."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(("127.0.0.1", port))
    except OSError as err:
        place.close()
        raise ConfigError(
            f"port {port} cannot be used ({reason(err)}): choose another --port"
        ) from err
    return place


def _run(models: Mapping[str, ServedModel], writer: GenerationWorker, place: socket.socket) -> Any:
    import uvicorn

    from qlora_wgpu.serving.app import ChatServer, StoppableServer

    config = uvicorn.Config(ChatServer(models, writer).app(), log_level="warning", lifespan="off")
    StoppableServer(config, writer.stop).run(sockets=[place])


def _name_of(place: str) -> str:
    """A run's name; an adapter lies in a folder of its run."""
    path = Path(place)
    named = path.parent if path.name == "adapter" and path.parent.name else path
    return named.resolve().name if exists(named) else place


def _named(others: Sequence[str], first: str) -> dict[str, str]:
    """Further adapters' folders by the names that clients give."""
    folders: dict[str, str] = {}
    for each in others:
        name, equals, place = each.partition("=")
        if not equals or not name or exists(Path(each)):
            name, place = "", each
        folder = adapter_in(place)
        if folder is None:
            raise ConfigError(
                f"{place} is a model: beside RUN only runs or adapters of the same base are served"
            )
        name = name or _name_of(folder)
        if name == first or name in folders:
            raise ConfigError(
                f"{place} would be called {name!r}, as another one is: give it a name of its own, "
                f"such as second={place}"
            )
        folders[name] = folder
    return folders

"""``serve``: an OpenAI-compatible API on this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from qlora_wgpu.cli._opening import ModelOptions, opening_options, prompt_format, require_template
from qlora_wgpu.cli._options import PORT, chat_template_option, count
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ConfigError, reason, require_extra
from qlora_wgpu.files import exists
from qlora_wgpu.generation import QLoRAModel
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.limits import MIB
from qlora_wgpu.model.feature_store import prompt_features
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.opening import configs_of
from qlora_wgpu.runs.resolve import adapter_in
from qlora_wgpu.runs.workload import GenerationWorkload, LossWorkload
from qlora_wgpu.serving.writer import GenerationWorker, ServedModel


@click.command()
@opening_options()
@click.argument("others", nargs=-1, metavar="[[NAME=]RUN]...")
@click.option("--port", default=8000, type=PORT, help="Port to listen on.")
@click.option("--name", help="The model's name in the API.", show_default="RUN's, or the model's")
@click.option(
    "--context",
    default=2048,
    type=count(),
    help="Maximum number of tokens of a conversation and its answer.",
)
@click.option(
    "--batch",
    default=4,
    type=count(),
    help="Maximum number of requests in a batch; others are queued.",
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
    """Serve a run's model through an OpenAI-compatible API.

    RUN is the folder of a run, such as runs/first, or of an adapter or a model. The base URL is
    http://127.0.0.1:8000/v1, on the loopback address only, and any API key is accepted. Further
    runs or adapters of the same base can be added; requests select one by `model`. Images are
    accepted as data: URIs (`image_url`) by vision-language models; they are never downloaded.
    """
    require_extra("serve")
    console = Terminal(stderr=True)
    listener = _listen(port)
    source = OpenedModel.open(opening.model)
    shown = name or _name_of(opening.adapter or opening.model)
    if source.for_adapter(opening.adapter).architecture.classes:
        if others:
            raise ConfigError(
                f"{shown} is a reward model or classifier, which is served by itself: leave out "
                f"{others[0]}"
            )
        _serve_scores(opening, source, shown, context, batch, template_name, listener, console)
        return
    folders = {shown: opening.adapter, **_named(others, shown)}
    written = {
        each: require_template(prompt_format(source, folder, template_name))
        for each, folder in folders.items()
    }
    extra = [folder for each, folder in folders.items() if each != shown and folder is not None]
    texts = replace(
        GenerationWorkload.of(
            source.pretrained, context, 0, batch, images=source.images is not None
        ),
        others=configs_of(source, extra),
    )
    model = opening.load(console, source, texts)
    models = {shown: ServedModel(model.active_adapter, written[shown], source.images)}
    for each, folder in folders.items():
        if each != shown and folder is not None:
            adapter_name = f"served as {each}"  # cannot be the first adapter's name
            model.load_adapter(folder, adapter_name)
            models[each] = ServedModel(adapter_name, written[each], source.images)
    if extra:
        console.print(_adapter_memory(model))
    features_of = None
    if source.images is not None:
        dtype = model.compute_dtype
        features_of = prompt_features(source.pretrained, source.images, model.device, dtype)
    writer = GenerationWorker(Engine(model, batch, texts.capacity), model, features_of)
    names = ", ".join(models)
    console.print(f"serving {names} at http://127.0.0.1:{port}/v1 (Ctrl-C to stop)")
    try:
        _run(models, writer, listener)
    finally:
        writer.close()


def _serve_scores(
    opening: ModelOptions, source: OpenedModel, name: str, context: int, batch: int,
    template_name: str | None, listener: socket.socket, console: Terminal,
) -> None:  # fmt: skip
    """Serves the scores of a reward model or classifier at ``/v1/score``."""
    import uvicorn

    from qlora_wgpu.serving.app import StoppableServer
    from qlora_wgpu.serving.scores import ScoreServer

    prompts = prompt_format(source, opening.adapter, template_name)
    scored = source.for_adapter(opening.adapter).pretrained
    workload = LossWorkload.of_scores(scored, batch, context)
    model = opening.load(console, source, workload)
    port = listener.getsockname()[1]
    console.print(f"serving {name} at http://127.0.0.1:{port}/v1/score (Ctrl-C to stop)")
    app = ScoreServer(name, model, prompts, batch, workload.length).app()
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    StoppableServer(config, lambda: None).run(sockets=[listener])


def _adapter_memory(model: QLoRAModel) -> str:
    adapters = list(model.adapters.values())
    configs = [adapter.config for adapter in adapters]
    each = [a.device_bytes for i, a in enumerate(adapters) if a.config not in configs[:i]]
    host = sum(adapter.host_bytes for adapter in adapters)
    return (
        f"{len(adapters)} adapters: {sum(each) / MIB:,.1f} MiB of GPU memory and "
        f"{host / MIB:,.1f} MiB of host memory"
    )


def _listen(port: int) -> socket.socket:
    """Binds a socket, before the model is loaded."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as err:
        listener.close()
        raise ConfigError(f"cannot open port {port} ({reason(err)}): set another --port") from err
    return listener


def _run(
    models: Mapping[str, ServedModel], writer: GenerationWorker, listener: socket.socket
) -> None:
    import uvicorn

    from qlora_wgpu.serving.app import ChatServer, StoppableServer

    config = uvicorn.Config(ChatServer(models, writer).app(), log_level="warning", lifespan="off")
    StoppableServer(config, writer.stop).run(sockets=[listener])


def _name_of(place: str) -> str:
    """The name of a run's folder, also if this is its adapter."""
    path = Path(place)
    named = path.parent if path.name == "adapter" and path.parent.name else path
    return named.resolve().name if exists(named) else place


def _named(others: Sequence[str], first: str) -> dict[str, str]:
    """The folders of further adapters, by name."""
    folders: dict[str, str] = {}
    for each in others:
        name, equals, place = each.partition("=")
        if not equals or not name or exists(Path(each)):
            name, place = "", each
        folder = adapter_in(place)
        if folder is None:
            raise ConfigError(
                f"{place} is a model: only runs and adapters of the same base can follow RUN"
            )
        name = name or _name_of(folder)
        if name == first or name in folders:
            raise ConfigError(
                f"{place} would have the same name as another, {name!r}: pass it with its own, "
                f"such as second={place}"
            )
        folders[name] = folder
    return folders

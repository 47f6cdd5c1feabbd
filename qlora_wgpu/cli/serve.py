"""``serve``: a model for clients of OpenAI's API, on this machine."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._model import Opening, open_adapted, opening_options
from qlora_wgpu.cli._sizes import whole_number
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.cli._text import prompt_format, require_template
from qlora_wgpu.errors import ConfigError
from qlora_wgpu.generation.engine import Engine
from qlora_wgpu.runs import OpenedModel
from qlora_wgpu.runs.reading import Texts
from qlora_wgpu.serving.extra import require_server
from qlora_wgpu.serving.writer import Writer


@click.command()
@opening_options()
@click.option("--port", default="8000", show_default=True, metavar="N", help="Port to listen on.")
@click.option("--name", help="The model's name for clients.", show_default="RUN's, or the model's")
@click.option(
    "--context",
    default="2048",
    show_default=True,
    metavar="N",
    help="Most tokens of a conversation and its answer.",
)
@click.option(
    "--batch",
    default="4",
    show_default=True,
    metavar="N",
    help="How many answers are written at a time; others wait.",
)
@click.option(
    "--chat-template",
    "template_name",
    help="Chat template instead of the run's or the tokenizer's: a .jinja file, or a built-in "
    "name.",
)
def serve(
    opening: Opening,
    port: str,
    name: str | None,
    context: str,
    batch: str,
    template_name: str | None,
) -> None:
    """Serve what a run has trained to clients of OpenAI's API, on this machine's loopback address.

    RUN is a run's folder, such as runs/first, or an adapter's or a model's. The base URL for
    clients is http://127.0.0.1:8000/v1, and any key will do.
    """
    require_server()
    console = Terminal(stderr=True)
    place = _listening(whole_number("--port", port))
    count, capacity = whole_number("--batch", batch), whole_number("--context", context)
    source = OpenedModel.open(opening.model)
    written = require_template(prompt_format(source, opening.adapter, template_name))
    texts = Texts.of(source.pretrained, capacity, 0, count)
    model = open_adapted(console, source, opening, texts)
    writer = Writer(Engine(model, count, texts.capacity), written)
    shown = name or _name_of(opening)
    console.print(
        f"{shown} for clients at http://127.0.0.1:{port}/v1 until Ctrl-C", highlight=False
    )
    try:
        _run(shown, writer, place)
    finally:
        writer.close()


def _listening(port: int) -> socket.socket:
    """A socket that is bound before the model is loaded.

    Raises:
        ConfigError: If the port cannot be used.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as err:
        place.close()
        raise ConfigError(f"port {port} cannot be used ({err}): choose another --port") from err
    return place


def _run(name: str, writer: Writer, place: socket.socket) -> Any:
    import uvicorn

    from qlora_wgpu.serving.app import ChatServer

    config = uvicorn.Config(ChatServer(name, writer).app(), log_level="warning", lifespan="off")
    uvicorn.Server(config).run(sockets=[place])


def _name_of(opening: Opening) -> str:
    """The run's name; an adapter lies in a folder of its run."""
    path = Path(opening.adapter or opening.model)
    named = path.parent if path.name == "adapter" and path.parent.name else path
    return named.resolve().name if named.exists() else str(opening.model)

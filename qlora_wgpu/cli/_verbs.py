"""The verbs of the command line, each imported when it is called: ``--help`` waits for none."""

from __future__ import annotations

import importlib
from copy import deepcopy
from difflib import get_close_matches

import click

from qlora_wgpu.cli._terminal import Commands

# Each verb's module, and the first sentence of its help, which a test holds to the command itself.
_VERBS = {
    "bench": ("bench", "Time training steps of SHAPE on this machine, and every kernel of them."),
    "certificates": (
        "certificates",
        "Make the certificate that the machines of a cluster share, in FOLDER.",
    ),
    "chat": ("chat", "Talk with what a run has trained, or with any model and adapter."),
    "data": ("data", "Show what the run of CONFIG, a YAML file or its folder, learns from."),
    "doctor": (
        "doctor",
        "Show the GPUs found, their driver, limits and features, and what that means for training.",
    ),
    "estimate": (
        "estimate",
        "Show how much memory training will take, without reading weights or using a GPU.",
    ),
    "eval": ("eval", "Measure loss and perplexity on held-out data: the base against an adapter."),
    "export": (
        "exporting",
        "Write what was trained as a GGUF file, for llama.cpp, Ollama and LM Studio.",
    ),
    "generate": (
        "generate",
        "Generate text with what a run has trained, or with any model and adapter.",
    ),
    "init": ("init", "Write a commented YAML for a model and a data file, fitted to both."),
    "merge": ("exporting", "Merge an adapter into its base model."),
    "push": (
        "push",
        "Send what a run has trained to the Hugging Face hub, as NAME (owner/name).",
    ),
    "quantize": (
        "exporting",
        "Write a model with its linear layers in 4 bits (NF4), as bitsandbytes does.",
    ),
    "serve": (
        "serve",
        "Serve what a run has trained to clients of OpenAI's API, on this machine's loopback "
        "address.",
    ),
    "train": ("train", "Fine-tune a model as CONFIG, a YAML file or the folder of a run, says."),
    "watch": (
        "watch",
        "Show a run's progress, curves and texts, from the folder that another process writes.",
    ),
    "web": (
        "web",
        "Write a page that trains a run's model in a browser, on a file that is dropped there.",
    ),
    "worker": (
        "worker",
        "Compute on this machine's GPU for training runs elsewhere, through a Dask scheduler.",
    ),
}
_FUNCTIONS = {"eval": "evaluate"}
_OPTIONS = frozenset(
    ("--adapter", "--chat-template", "--config", "--data", "--eval", "--gguf", "--model", "--out")
)
_PATH = click.Path(readable=False)  # whether it can be read is told by who reads it


class Verbs(Commands):
    """The group of all verbs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, in alphabetical order."""
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb, imported now."""
        if cmd_name not in _VERBS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"qlora_wgpu.cli.{_VERBS[cmd_name][0]}")
            command: click.Command = vars(module)[_FUNCTIONS.get(cmd_name, cmd_name)]
            complete_paths(command)
            # A command remembers the help of its first caller: each group has its own.
            self.commands[cmd_name] = deepcopy(command)
        return self.commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the verb, or tells the one that was meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            near = get_close_matches(args[0], _VERBS, n=1)
            if near and "mean" not in err.message:  # as click itself may say one day
                ctx.fail(f"{err.message} Did you mean {near[0]!r}?")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the verbs with their first sentences, without importing them."""
        limit = formatter.width - 6 - max(map(len, _VERBS))
        shown = [(name, click.Command(name, help=text)) for name, (_, text) in _VERBS.items()]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit)) for name, command in shown]
            )


def complete_paths(command: click.Command) -> None:
    """Lets a shell complete paths for options that name a file, and for all first arguments.

    A hub name fits in their place as well: nothing is looked up.
    """
    for parameter in command.params:
        if parameter.type is click.STRING and _takes_path(parameter):
            parameter.type = _PATH


def _takes_path(parameter: click.Parameter) -> bool:
    if isinstance(parameter, click.Argument):
        return parameter.nargs == 1
    return not _OPTIONS.isdisjoint(parameter.opts)

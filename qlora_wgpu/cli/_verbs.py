"""The group of all verbs, each imported when it is called: ``--help`` waits for none."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

import click

from qlora_wgpu.errors import QLoRAError, on_command_line, reason
from qlora_wgpu.shell_words import shell_command
from qlora_wgpu.visible import visible

# The first sentence of each verb's help, which a test holds to the command itself.
_VERBS = {
    "bench": "Time training steps of SHAPE on this machine, and every kernel of them.",
    "certificates": "Make the certificate that the machines of a cluster share, in FOLDER.",
    "chat": "Talk with what a run has trained, or with any model and adapter.",
    "data": "Show what the run of CONFIG, a YAML file or its folder, learns from.",
    "doctor": "Show the GPUs found, their driver, limits and features, and what that means "
    "for training.",
    "estimate": "Show how much memory training will take, without reading weights or using a GPU.",
    "eval": "Measure loss and perplexity on held-out data: the base against an adapter.",
    "export": "Write what was trained as a GGUF file, for llama.cpp, Ollama and LM Studio.",
    "generate": "Generate text with what a run has trained, or with any model and adapter.",
    "init": "Write a commented YAML for a model and a data file, fitted to both.",
    "merge": "Merge an adapter into its base model.",
    "push": "Send what a run has trained to the Hugging Face hub, as NAME (owner/name).",
    "quantize": "Write a model with its linear layers in 4 bits (NF4), as bitsandbytes does.",
    "serve": "Serve what a run has trained to clients of OpenAI's API, on this machine's "
    "loopback address.",
    "train": "Fine-tune a model as CONFIG, a YAML file or the folder of a run, says.",
    "watch": "Show a run's progress, curves and texts, from the folder that another process "
    "writes.",
    "web": "Write a page that trains a run's model in a browser, on a file that is dropped there.",
    "worker": "Compute on this machine's GPU for training runs elsewhere, through a Dask "
    "scheduler.",
}
_MODULES = {  # of those that share one
    **dict.fromkeys(("export", "merge", "quantize"), "exporting"),
    **dict.fromkeys(("certificates", "worker"), "cluster"),
}
_TYPED = f"{__name__}.typed"
_GIVEN = {  # how a command is given what it takes by an option, by that option's parameter
    "prompt": "A text is given with --prompt",
    "data_paths": "Model and data are given with --model and --data",
    "gguf_file": "The file to write is given with --gguf",
    "out": "The folder to write is given with --out",
}


class Verbs(click.Group):
    """All verbs; messages about arguments show what these hold, and may say what was meant."""

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **options: Any
    ) -> click.Context:
        """Reads the group's own arguments."""
        with _with_hints():
            typed = shell_command(["qlora-wgpu", *args])
            context = super().make_context(info_name, args, *others, **options)
            context.meta[_TYPED] = typed
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Reads a command's arguments and runs it."""
        with _with_hints(), on_command_line(ctx.meta[_TYPED]):
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, in alphabetical order."""
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb, imported now."""
        if cmd_name not in _VERBS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"{__package__}.{_MODULES.get(cmd_name, cmd_name)}")
            found = (each for each in vars(module).values() if isinstance(each, click.Command))
            command = next(each for each in found if each.name == cmd_name)
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
        shown = [click.Command(name, help=text) for name, text in _VERBS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(c.name or "", c.get_short_help_str(limit)) for c in shown])


@contextmanager
def _with_hints() -> Iterator[None]:
    """Adds to click's messages; and Ctrl-C and broken pipes get no exit codes of click's."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError as err:
        raise QLoRAError(f"a connection was closed at its other end: {reason(err)}") from err
    except click.ClickException as err:
        vars(err).update(message=visible(err.message) + _hint(err))
        raise


def _hint(err: click.ClickException) -> str:
    """How a setting is given that was taken for an option, or an option's value for an argument."""
    if not isinstance(err, click.UsageError) or err.ctx is None:
        return ""
    parameters = {parameter.name for parameter in err.ctx.command.params}
    if type(err) is click.UsageError:
        return next((f". {hint}" for name, hint in _GIVEN.items() if name in parameters), "")
    if not isinstance(err, click.NoSuchOption) or "overrides" not in parameters:
        return ""
    # Imported where somebody has mistyped: the schema takes its time, which --help would pay.
    from qlora_wgpu.config.names import key_for
    from qlora_wgpu.config.schema import sections

    name = err.option_name.lstrip("-").replace("-", "_")
    homes = [section for section, keys in sections().items() if name in keys]
    key = (homes[0], name) if homes else key_for(name)
    return "" if key is None else f" It is a setting: {'.'.join(key)}=VALUE"

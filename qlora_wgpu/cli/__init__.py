"""The command line: the group of all commands, each imported when it is called, and their errors.

``--help`` imports none of them.
"""

from __future__ import annotations

import importlib
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.errors import ERROR, DeviceError, QLoRAError, on_command_line, reason, shell_command
from qlora_wgpu.gpu import driver
from qlora_wgpu.supervision.child import Journal, end_if_hung
from qlora_wgpu.supervision.processes import MORE_MEMORY, address_space
from qlora_wgpu.supervision.streams import drop_unwritable, guard_streams
from qlora_wgpu.version import __version__
from qlora_wgpu.visible import visible

# ---- the group -----------------------------------------------------------------------------------

# The first paragraph of each command's help; a test compares them. At 80 columns, the list has 60.
_COMMANDS = {
    "bench": "Benchmark training steps of SHAPE and each of their kernels.",
    "certificates": "Create the certificate that a cluster shares, in FOLDER.",
    "chat": "Chat with a run's model, or with any model and adapter.",
    "classify": "Score text or chats with a reward model or classifier.",
    "data": "Preview the training examples of CONFIG and their loss mask.",
    "doctor": "Show this machine's GPUs, and what they can train.",
    "estimate": "Estimate the GPU memory that training needs.",
    "eval": "Measure held-out loss and perplexity of base and adapter.",
    "export": "Export a run's model as GGUF, for llama.cpp and Ollama.",
    "generate": "Generate text with a run's model, or any model and adapter.",
    "init": "Write a commented YAML file for a model and data.",
    "merge": "Merge an adapter into its base model.",
    "push": "Upload a run's adapter to the Hugging Face Hub as NAME.",
    "quantize": "Quantize a model's linear layers to NF4, like bitsandbytes.",
    "serve": "Serve a run's model through an OpenAI-compatible API.",
    "train": "Fine-tune a model as configured in CONFIG.",
    "watch": "Show the progress of a run in another process.",
    "web": "Build a web page that fine-tunes a run's model in a browser.",
    "worker": "Compute on this machine's GPU for runs on other machines.",
}
_MODULES = {  # of commands that share one
    **dict.fromkeys(("export", "merge", "push", "quantize"), "exporting"),
    **dict.fromkeys(("certificates", "worker"), "cluster"),
}
_TYPED = f"{__name__}.typed"
_OPTION_HINTS = {  # by a parameter of the command, where a value was given without its option
    "prompt": "Pass a prompt with --prompt",
    "data_paths": "Pass model and data with --model and --data, or a config with --from",
    "gguf_file": "Pass the output file with --gguf",
    "out": "Pass the output folder with --out",
}


class Commands(click.Group):
    """The group of all commands, with hints in messages about arguments."""

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
        """All names, in alphabetical order."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command."""
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(f"{__name__}.{_MODULES.get(cmd_name, cmd_name)}")
            found = (each for each in vars(module).values() if isinstance(each, click.Command))
            command = next(each for each in found if each.name == cmd_name)
            # A command keeps the help of its first caller, so each group has a copy.
            self.commands[cmd_name] = deepcopy(command)
        return self.commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command, or suggests the closest name."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as err:
            near = get_close_matches(args[0], _COMMANDS, n=1)
            if near and "mean" not in err.message:  # newer versions of click may suggest it
                ctx.fail(f"{err.message} Did you mean {near[0]!r}?")
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        limit = formatter.width - 6 - max(map(len, _COMMANDS))
        shown = [click.Command(name, help=text) for name, text in _COMMANDS.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(c.name or "", c.get_short_help_str(limit)) for c in shown])


@contextmanager
def _with_hints() -> Iterator[None]:
    """Adds hints to click's messages; Ctrl-C and broken pipes keep our exit codes."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError as err:
        raise QLoRAError(f"a connection was closed by the other end: {reason(err)}") from err
    except click.ClickException as err:
        hint = _hint(err)
        vars(err).update(message=visible(err.message) + hint)
        if hint and isinstance(err, click.NoSuchOption):
            vars(err).update(possibilities=None)  # a setting is meant, not a similar option
        raise


def _hint(err: click.ClickException) -> str:
    """How to pass a setting that was typed as an option, or a value without its option."""
    if not isinstance(err, click.UsageError) or err.ctx is None:
        return ""
    parameters = {parameter.name for parameter in err.ctx.command.params}
    if type(err) is click.UsageError:
        return next((f". {hint}" for name, hint in _OPTION_HINTS.items() if name in parameters), "")
    if not isinstance(err, click.NoSuchOption) or "overrides" not in parameters:
        return ""
    # The schema takes a while to import, which --help does not need.
    from qlora_wgpu.config.names import key_for
    from qlora_wgpu.config.schema import sections

    name = err.option_name.lstrip("-").replace("-", "_")
    homes = [section for section, keys in sections().items() if name in keys]
    key = (homes[0], name) if homes else key_for(name)
    return "" if key is None else f" It is a setting: {'.'.join(key)}=VALUE"


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="qlora-wgpu")
def commands() -> None:
    """Fine-tune language models with QLoRA on any GPU, through WebGPU.

    Start with `qlora-wgpu doctor` to see your GPU, then `init`, `data` and `train`.
    """


# ---- how a command ends --------------------------------------------------------------------------

_NO_MEMORY = (
    "host memory is exhausted: close other programs, or raise the limit (ulimit -v and -u, or the "
    "container's); what was saved before is intact"
)
_RUNTIME_ERRORS = {  # parts of messages of RuntimeErrors, which have no types of their own
    "can't start new thread": _NO_MEMORY,
    "determine home directory": "a path starts with ~, but that home directory does not exist: "
    "write the path out, or set HOME",
}


def run_command(journal: Journal | None = None) -> None:
    """Runs a command; a user's mistake is one sentence on stderr and exit code 2.

    A supervised process notes its progress in the journal.
    """
    if journal is not None:
        # Imports NumPy, which --help and --version do not need.
        from qlora_wgpu.mapped_files import map_listeners

        end_if_hung(driver.overdue_call)
        driver.listeners.append(journal.note_under_way)
        map_listeners.append(journal.note_mapped)
    guard_streams()
    warnings.showwarning = _show_warning
    try:
        _run_command(journal)
    except SystemExit as end:
        if journal is not None and end.code in (0, None):
            journal.note_done()  # without it, an exit code of 0 is a driver's, not the command's
        raise
    finally:
        drop_unwritable()


def _run_command(journal: Journal | None) -> None:
    try:
        commands.main(prog_name="qlora-wgpu", standalone_mode=True, obj=journal)
    except QLoRAError as err:
        text, code = _with_memory_limit(err), err.exit_code
    except MemoryError:
        text, code = _NO_MEMORY, ERROR
    except OSError as err:  # one that nothing else explains, such as a folder without permission
        text, code = _os_error(err), ERROR
    except RuntimeError as err:
        sentences = [text for words, text in _RUNTIME_ERRORS.items() if words in str(err)]
        if not sentences:
            raise
        text, code = sentences[0], ERROR
    # Printed after the handlers, when what the traceback held is free.
    Terminal(stderr=True, soft_wrap=True).print(f"error: {text}", style="red")
    sys.exit(code)


def _with_memory_limit(err: QLoRAError) -> str:
    """An error's sentence, which names the limit of address space if that made a driver fail."""
    from qlora_wgpu.gpu.adapters import INSTALL_HINT

    limit, cause = address_space(), err.__cause__
    is_none_found = INSTALL_HINT in str(err)
    if limit is None or not isinstance(err, DeviceError) or not (cause or is_none_found):
        return str(err)
    failed = (
        "no GPU was found" if is_none_found else f"the GPU failed ({' '.join(str(cause).split())})"
    )
    return f"{failed}, with {limit}: {MORE_MEMORY}"


def _os_error(err: OSError) -> str:
    """A failure of the operating system, with the file names it is about."""
    names = [str(name) for name in (err.filename, err.filename2) if name is not None]
    if not names:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the working directory no longer exists: change to another"
    return ": ".join((*(names or ["input or output failed"]), reason(err)))


def _show_warning(
    message: Warning | str, category: type[Warning], *where: Any, **options: Any
) -> None:
    """Shows a warning as a sentence, without the line of code that raised it."""
    from qlora_wgpu.config.section import RenamedKeyWarning

    console = Terminal(stderr=True, soft_wrap=True)
    (console.note if issubclass(category, RenamedKeyWarning) else console.warning)(message)

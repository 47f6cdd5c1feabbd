"""The command line: one file per verb, each calling public functions and read when it is called."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import click

from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.cli._verbs import Verbs
from qlora_wgpu.errors import ERROR, DeviceError, QLoRAError, reason
from qlora_wgpu.gpu import driver
from qlora_wgpu.supervision.child import end_if_hung
from qlora_wgpu.supervision.journal import Journal
from qlora_wgpu.supervision.processes import MORE_MEMORY, address_space
from qlora_wgpu.supervision.streams import drop_unwritable, guard_streams
from qlora_wgpu.version import __version__

_NO_MEMORY = (
    "this process gets no more host memory: close other programs, or raise what it may have "
    "(ulimit -v and -u, the container's limit); what was saved before is whole"
)

_SAID = {
    "can't start new thread": _NO_MEMORY,
    "determine home directory": "a path begins with ~, and there is no such home folder: write it "
    "out, or set HOME",
}


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="qlora-wgpu")
def commands() -> None:
    """Fine-tune language models with QLoRA on any GPU, through WebGPU.

    Start with `qlora-wgpu doctor` to see your GPU, then `init`, `data` and `train`.
    """


def run_command(journal: Journal | None = None) -> None:
    """Runs a command; a user's mistake is one sentence on stderr and exit code 2.

    A supervised process notes in the journal how far it is.
    """
    if journal is not None:
        # Imports NumPy, which what only tells of the program does without.
        from qlora_wgpu.mapped_files import map_listeners

        end_if_hung(driver.overdue_call)
        driver.listeners.append(journal.note_under_way)
        map_listeners.append(journal.note_mapped)
    guard_streams()
    warnings.showwarning = _tell
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
        text, code = _under_limits(err), err.exit_code
    except MemoryError:
        text, code = _NO_MEMORY, ERROR
    except OSError as err:  # what no door has told of: a folder that may not be looked into
        text, code = _of_the_system(err), ERROR
    except RuntimeError as err:  # these have no types of their own
        sentences = [text for words, text in _SAID.items() if words in str(err)]
        if not sentences:
            raise
        text, code = sentences[0], ERROR
    # Told behind the handler: what the traceback holds is free by then.
    Terminal(stderr=True, soft_wrap=True).print(f"error: {text}", style="red")
    sys.exit(code)


def _under_limits(err: QLoRAError) -> str:
    """An error's sentence; a driver that fails under a limit of memory is not to blame."""
    from qlora_wgpu.gpu.adapters import INSTALL_HINT

    limit, cause = address_space(), err.__cause__
    is_none_found = INSTALL_HINT in str(err)
    if limit is None or not isinstance(err, DeviceError) or not (cause or is_none_found):
        return str(err)
    failed = (
        "no GPU was found" if is_none_found else f"the GPU failed ({' '.join(str(cause).split())})"
    )
    return f"{failed}, and this process may have {limit}: {MORE_MEMORY}"


def _of_the_system(err: OSError) -> str:
    """A failure of the operating system's, with the file that it is about."""
    names = [str(name) for name in (err.filename, err.filename2) if name is not None]
    if not names:
        try:
            Path.cwd()
        except FileNotFoundError:
            return "the working directory was removed: change to one that is there"
    return ": ".join((*(names or ["input or output failed"]), reason(err)))


def _tell(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """Shows a warning as a sentence; where in the code it arose says nothing to a user."""
    from qlora_wgpu.config.section import RenamedKeyWarning

    console = Terminal(stderr=True, soft_wrap=True)
    (console.note if issubclass(category, RenamedKeyWarning) else console.warning)(message)

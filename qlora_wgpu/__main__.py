"""``qlora-wgpu`` and ``python -m qlora_wgpu``.

A command that opens a GPU or maps weights runs in a child process, which a driver may crash;
``--help`` and ``--version`` do not even import the supervisor.
"""

from __future__ import annotations

import signal
import sys

_UNSUPERVISED = (["--version"], ["--help"], ["-h"])


def main() -> None:
    """Runs a command and exits with its code."""
    try:
        _main()
    except KeyboardInterrupt:  # while importing, too, before other code can handle it
        sys.exit(128 + signal.SIGINT)


def _main() -> None:
    from qlora_wgpu.supervision.child import Journal
    from qlora_wgpu.supervision.processes import unblock_signals
    from qlora_wgpu.supervision.streams import replace_closed

    unblock_signals()
    replace_closed()
    journal = Journal.inherited()
    if journal is None and sys.argv[1:] not in _UNSUPERVISED:
        from qlora_wgpu.supervision.parent import supervise

        if (code := supervise(sys.argv[1:])) is not None:
            sys.exit(code)
    if journal is not None:
        from qlora_wgpu.supervision.child import begin

        begin(journal)
    from qlora_wgpu.cli import run_command  # everything else is imported with it

    run_command(journal)


if __name__ == "__main__":
    main()

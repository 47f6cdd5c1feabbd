"""Commands run within this process, which starts none anew for each."""

import os
import subprocess
import sys
import warnings
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from copy import deepcopy
from io import BytesIO, StringIO, TextIOWrapper
from unittest.mock import patch

from qlora_wgpu import cli


def run_here(*args, cwd, encoding=None, stdin=None):
    """What `qlora-wgpu` does with its arguments, all but the process that supervises it.

    With the encoding of a console its standard output is a file of it, and what is in it bytes.
    """
    out = StringIO() if encoding is None else TextIOWrapper(BytesIO(), encoding)
    err = StringIO()
    code = 0
    with ExitStack() as stack:
        # Commands remember the help of whoever called them first, which other tests look at.
        stack.enter_context(patch("qlora_wgpu.cli.commands", deepcopy(cli.commands)))
        if stdin is not None:
            stack.enter_context(patch.object(sys, "stdin", StringIO(stdin)))
        stack.enter_context(patch.object(sys, "argv", ["qlora-wgpu", *map(str, args)]))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "200"}))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")  # a warning is shown, as for a user
        stack.enter_context(chdir(cwd))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            cli.run_command()
        except SystemExit as end:
            code = end.code or 0
    out.flush()
    said = out.getvalue() if encoding is None else out.buffer.getvalue()
    return subprocess.CompletedProcess(args, code, said, err.getvalue())

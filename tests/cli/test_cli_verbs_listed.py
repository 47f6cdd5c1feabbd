"""The list of commands, which imports none of them, says what they say of themselves."""

import subprocess
import sys
from copy import deepcopy

import pytest
from click import Context
from support.commands import run_here

from qlora_wgpu.cli import _COMMANDS, commands


@pytest.mark.parametrize("name", _COMMANDS)
def test_a_verb_is_listed_by_its_own_first_sentence(name):
    command = deepcopy(commands).get_command(Context(commands), name)
    assert command is not None and command.name == name
    paragraph = " ".join(command.help.split("\n\n")[0].split())
    assert paragraph == _COMMANDS[name]
    width = 80 - 2 - 6 - max(map(len, _COMMANDS))  # of the list in a terminal of 80 columns
    assert command.get_short_help_str(width) == paragraph.removesuffix(".") + "."


def test_a_mistyped_verb_is_told_the_one_that_was_meant(tmp_path):
    assert (
        "No such command 'trian'. Did you mean 'train'?" in run_here("trian", cwd=tmp_path).stderr
    )
    assert "mean" not in run_here("xyzzy", cwd=tmp_path).stderr


def test_groups_share_no_command():
    one, other = deepcopy(commands), deepcopy(commands)
    context = Context(commands)
    assert one.get_command(context, "train") is one.get_command(context, "train")
    assert one.get_command(context, "train") is not other.get_command(context, "train")
    assert one.get_command(context, "trian") is None


SCRIPT = """
import sys
sys.argv[1:] = [{argument!r}]
from qlora_wgpu import __main__
try:
    __main__.main()
finally:
    heavy = {{"numpy", "pydantic", "tokenizers", "wgpu", "qlora_wgpu.runs"}} & set(sys.modules)
    print("imported", sorted(heavy))
"""


@pytest.mark.parametrize(("argument", "shown"), [("--version", "version"), ("-h", "  worker  ")])
def test_telling_of_the_program_imports_little(argument, shown):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(argument=argument)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout and done.stdout.rstrip().endswith("imported []")

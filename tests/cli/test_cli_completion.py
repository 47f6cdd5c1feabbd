"""What shells are offered: commands, options, and paths where a command takes one."""

from copy import deepcopy

import pytest
from click.shell_completion import ShellComplete, get_completion_class

from qlora_wgpu.cli import commands


def offered(args, incomplete=""):
    complete = ShellComplete(deepcopy(commands), {}, "qlora-wgpu", "_QLORA_WGPU_COMPLETE")
    return complete.get_completions(args, incomplete)


@pytest.mark.parametrize(
    "args",
    [
        ["train"], ["eval"], ["data"], ["estimate"], ["bench"],
        ["chat", "--model"], ["chat", "--adapter"], ["generate", "--chat-template"],
        ["merge", "--adapter"], ["merge", "--out"], ["quantize", "--model"], ["export", "--gguf"],
        ["init", "--data"], ["init", "--eval"], ["eval", "run.yaml", "--data"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_paths_are_completed(args):
    assert [item.type for item in offered(args, "ru")] == ["file"]


def test_commands_options_and_choices_are_completed():
    assert [item.value for item in offered([], "tr")] == ["train"]
    assert "--resume" in [item.value for item in offered(["train", "run.yaml"], "--r")]
    assert [item.value for item in offered(["generate", "--scheme"], "n")] == ["nf4", "none"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_that_the_documentation_names(shell):
    assert get_completion_class(shell) is not None

"""Commands that are offered to be copied do what they say in the reader's shell."""

import json
import subprocess
import sys

import pytest

from qlora_wgpu.errors import shell_command, shell_word

WORDS = ["runs/first", "my run", "", "a'b", "lora={r: 8}", "C:\\a b\\", "-x", "a&b", "(1)", "é"]


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (r"C:\runs\first", r"C:\runs\first"),  # within '', it would be another name to cmd.exe
        ("runs/first.yaml", "runs/first.yaml"),
        ("lora.r=8", "lora.r=8"),
        ("~\\é", "~\\é"),
        ("my run.yaml", '"my run.yaml"'),
        ("C:\\my runs\\", '"C:\\my runs\\\\"'),
        ('a "b"\\"', '"a \\"b\\"\\\\\\""'),
        ("a'b", '"a\'b"'),
        ("a,b", '"a,b"'),  # of which PowerShell makes a list
        ("a&b", '"a&b"'),
        ("", '""'),
    ],
)
def test_words_for_windows(word, shown):
    assert shell_word(word, windows=True) == shown


def test_words_elsewhere():
    assert shell_command(["a", "my run", r"b\c"], windows=False) == r"a 'my run' 'b\c'"


def test_this_systems_shell_reads_them_back():
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    typed = shell_command([sys.executable, "-c", code, *WORDS])
    done = subprocess.run(typed, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == WORDS

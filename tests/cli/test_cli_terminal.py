"""What others wrote reaches the terminal as text: names, data, messages, and what a model says."""

import json
import re
import sys
from copy import deepcopy
from io import StringIO
from types import SimpleNamespace

import pytest
import tokenizers
from click.testing import CliRunner
from e2e.tiny import write_model
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from support.tiny_tokenizer import tiny_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from qlora_wgpu import cli
from qlora_wgpu.cli._display import Display
from qlora_wgpu.cli._opening import stream
from qlora_wgpu.cli._terminal import Terminal, write_json
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import DataError, OutOfMemoryError
from qlora_wgpu.gpu.adapters import no_gpu
from qlora_wgpu.visible import one_line, quoted, visible, visible_json, without_secrets

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HOSTILE = "\x1b]0;own\x07\x1b[2J\x9b31m\rover\x08\u202egnp.exe\u2066\x7f\ud800[red]x[/gone]:smile:"
SHOWN = r"\x1b]0;own\x07\x1b[2J\x9b31m\rover\x08\u202egnp.exe\u2066\x7f\ud800[red]x[/gone]:smile:"


def test_control_characters_are_shown():
    assert visible(HOSTILE) == SHOWN
    assert visible("a\tb\nc é你🙂 \u200d") == "a\tb\nc é你🙂 \u200d"
    assert "".join(visible(c) for c in HOSTILE) == SHOWN  # in whatever parts it comes
    assert one_line("a\nb\tc") == r"a\nb\tc"
    assert quoted("x" * 1000) == "'" + "x" * 80 + "…'" and quoted(["\x1b"]) == r"'['\x1b']'"
    assert visible("\U000e0041") == r"\U000e0041"


def test_json_stays_what_it_was(capsys):
    row = {"text": HOSTILE + "\U000e0041", "n": [1, "é你🙂"]}
    assert not OBEYED.search(visible_json(row)) and "\U000e0041" not in visible_json(row)
    assert "é你🙂" in visible_json(row) and json.loads(visible_json(row)) == row
    write_json(row)
    assert json.loads(capsys.readouterr().out) == row


def test_secrets_of_the_environment_are_left_out():
    environ = {"HF_TOKEN": "secret-token-1", "WANDB_API_KEY": ""}
    text = "https://me:pass@host/x?a=secret-token-1 hf_abcdefghijklmnopqrstuv"
    assert without_secrets(text, environ) == "https://***@host/x?a=*** ***"
    assert without_secrets("", environ) == ""
    # What is so short may stand anywhere.
    assert without_secrets("a 12345678 1234567", {"HF_TOKEN": " 12345678\n"}) == "a *** 1234567"
    assert without_secrets("a 1234567", {"HF_TOKEN": "1234567"}) == "a 1234567"


def printed(show):
    console = Terminal()
    console.file = StringIO()
    console.width = 300
    show(console)
    return console.file.getvalue()


def _table(console):
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)


WAYS = {
    "text": lambda console: console.print(HOSTILE),
    "styled text": lambda console: console.print(Text(HOSTILE, style="green")),
    "a panel": lambda console: console.print(Panel(Text(HOSTILE), title=Text(HOSTILE))),
    "a table": _table,
    "a warning": lambda console: console.warning(HOSTILE),
    "a note": lambda console: Display(console).note(HOSTILE),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_the_terminal_shows_it(way):
    output = printed(WAYS[way])
    assert not OBEYED.search(output) and "[red]x[/gone]:smile:" in output
    assert r"\x1b[2J\x9b31m" in output


def test_what_is_being_done_is_shown():
    console = Terminal()
    console.file = StringIO()
    with Display(console) as display:
        for _ in range(2):
            display.activity(f"preparing {HOSTILE}")
    assert not OBEYED.search(console.file.getvalue())


def test_what_a_model_says_is_shown(capsys):
    tokenizer = tiny_tokenizer()  # a byte a token, so every sequence comes in parts
    said = HOSTILE.replace("\ud800", "")
    ids = tokenizer.encode(said, add_special_tokens=False)
    assert stream(tokenizer, ids) == said  # the conversation itself goes on unchanged
    assert capsys.readouterr().out == SHOWN.replace(r"\ud800", "") + "\n"


def test_what_goes_on_keeps_its_first_space(capsys):
    """With a decoder of SentencePiece's kind, which leaves out a text's first space."""
    vocab = {"<unk>": 0, "▁the": 1, "▁fox": 2, "es": 3, "▁run": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    assert stream(tokenizer, [2, 3, 4], context=[1]) == " foxes run"
    assert stream(tokenizer, [3], context=[1, 2]) == "es"
    assert stream(tokenizer, [2, 3]) == "foxes"  # where a text begins
    assert capsys.readouterr().out == " foxes run\nes\nfoxes\n"


def test_half_a_character_before_does_not_hurt():
    tokenizer = tiny_tokenizer()
    whole = tokenizer.encode("é☃", add_special_tokens=False)
    assert stream(tokenizer, whole[3:], context=whole[:3]) == "☃"


@pytest.fixture(autouse=True)
def own_commands(monkeypatch):
    """Commands remember the help of whoever called them first, which other tests look at."""
    monkeypatch.setattr("qlora_wgpu.cli.commands", deepcopy(cli.commands))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    write_model(folder / "model")
    return folder


_TURN = "" if sys.getfilesystemencoding() == "ascii" else "\u202e"  # ASCII cannot spell it
NAME = f"a\x1b]0;owned\x07[red][/gone]{_TURN}.jsonl"


def test_names_and_rows(place, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    rows = [{"messages": [{"role": r, "content": "a\x1b[2J\u202e"} for r in ("user", "assistant")]}]
    (place / NAME).parent.mkdir()
    (place / NAME).write_text(json.dumps(rows[0]) + "\n{}\n")
    config = {"model": {"path": str(place / "model")}, "data": {"train": str(place / NAME)}}
    (place / "run.yaml").write_text(json.dumps(config))
    done = CliRunner().invoke(
        deepcopy(cli.commands), ["data", str(place / "run.yaml"), "data.max_seq_length=64"]
    )
    assert done.exit_code == 0, done.output
    assert "1 of 2 rows is empty" in " ".join(done.output.split())
    assert not OBEYED.search(done.output)


@pytest.mark.parametrize(
    "args",
    [
        ("train", "gone\x1b[2J[/x].yaml"),
        ("train", "run.yaml", "--\x1b[2J"),
        ("\x1b[2J",),
        ("bench", "--dtype", "\x1b[2J"),
        ("train", "run.yaml", "data.\x1b[2J=1"),
        ("data", "run.yaml", "data.train=\udcff\x1b[2J.jsonl"),
    ],
)
def test_mistakes(place, monkeypatch, capsys, args):
    monkeypatch.chdir(place)
    config = {"model": {"path": "model"}, "data": {"train": "x.jsonl"}}
    (place / "run.yaml").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["qlora-wgpu", *args])
    with pytest.raises(SystemExit) as caught:
        cli.run_command()
    output = capsys.readouterr()
    assert caught.value.code == 2 and not OBEYED.search(output.err + output.out)
    assert r"\x1b[2J" in output.err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_no_host_memory(monkeypatch, capsys, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("qlora_wgpu.cli.commands.main", fail)
    with pytest.raises(SystemExit) as caught:
        cli.run_command()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: host memory is exhausted")


@pytest.mark.parametrize("limit", ["address space limited to 500 MiB (ulimit -v)", None])
@pytest.mark.parametrize(
    ("error", "cause", "told"),
    [
        (no_gpu(), None, "no GPU was found, with address space limited to 500 MiB"),
        (
            OutOfMemoryError("llvmpipe ran out of memory: lower the batch size"),
            RuntimeError("Not enough\n  memory left"),
            "the GPU failed (Not enough memory left), with address space limited to 500",
        ),
        (OutOfMemoryError("it takes 5 MiB, more than device.memory"), None, None),
        (DataError("a row has no text"), ValueError("x"), None),
    ],
)
def test_a_drivers_failure_under_a_limit_of_memory(monkeypatch, capsys, limit, error, cause, told):
    """The limit is named in place of the driver; what else is wrong stays what it is."""

    def fail(*_, **__):
        raise error from cause

    monkeypatch.setattr("qlora_wgpu.cli.commands.main", fail)
    monkeypatch.setattr("qlora_wgpu.cli.address_space", lambda: limit)
    with pytest.raises(SystemExit) as caught:
        cli.run_command()
    shown = capsys.readouterr().err
    assert caught.value.code == 2
    if limit is None or told is None:
        assert shown == f"error: {error}\n"
    else:
        assert shown.startswith(f"error: {told}") and shown.endswith("ulimit -v unlimited\n")


def test_a_notebook_gets_plain_lines(monkeypatch):
    """Its kernel calls itself a terminal, but does not move the cursor up."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not Terminal().is_terminal
    del shell.kernel  # IPython in a terminal
    assert Terminal().is_terminal


@pytest.mark.parametrize("columns", ["0", "-3", "many", "", "40"])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_of_no_columns_shows_something(monkeypatch, columns, is_terminal):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")  # rich asks a dumb one for nothing
    monkeypatch.setattr(Terminal, "is_terminal", is_terminal)
    shown = StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    console = Terminal()
    console.print("what a run has learnt")
    assert "what a run has learnt" in shown.getvalue()
    assert (console.width == 40) == (columns == "40") and console.width > 0


def test_numbers_have_no_colours_of_their_own(monkeypatch):
    """What looks for them takes a minute for a long line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Terminal, "is_terminal", True)
    monkeypatch.setattr(sys, "stdout", StringIO())
    Terminal().print("step 3: 'a' True /path")
    assert "\x1b" not in sys.stdout.getvalue()


def test_a_path_is_whole_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Terminal, "is_terminal", True)
    shown = StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    Terminal().facts({"adapter": "runs/a-long-name/adapter"})
    assert "runs/a-long-name/adapter" in re.sub(r"\s", "", shown.getvalue())

"""What a command says to an option that is a setting, and when it notes that it has ended."""

import signal
import sys
from types import SimpleNamespace

import click
import pytest

from qlora_wgpu import cli
from qlora_wgpu.cli import doctor
from qlora_wgpu.errors import DeviceError, QLoRAError


def error_of(name, *parameters, kind=click.NoSuchOption):
    command = click.Command("train", params=[click.Argument([each]) for each in parameters])
    context = click.Context(command)
    return kind(name, ctx=context) if kind is click.NoSuchOption else kind("it is wrong", context)


@pytest.mark.parametrize(("option", "hint"), [
    ("--max-steps", " It is a setting: train.max_steps=VALUE"),
    ("--lora_r", " It is a setting: lora.r=VALUE"),
    ("--lora-alpha", " It is a setting: lora.lora_alpha=VALUE"),
    ("--zzzz", ""),
])  # fmt: skip
def test_an_option_that_is_a_setting(option, hint):
    assert cli._hint(error_of(option, "config", "overrides")) == hint
    assert cli._hint(error_of(option, "config")) == ""


def test_other_errors_have_no_hint():
    assert cli._hint(click.ClickException("no")) == ""
    assert cli._hint(click.UsageError("no")) == ""
    assert cli._hint(error_of("", "zzzz", kind=click.UsageError)) == ""


def test_a_hint_stands_instead_of_similar_options():
    with pytest.raises(click.NoSuchOption) as told, cli._with_hints():
        raise error_of("--max-steps", "overrides")
    assert told.value.message.endswith(" It is a setting: train.max_steps=VALUE")
    assert not told.value.possibilities


@pytest.mark.parametrize(("error", "raised"), [
    (KeyboardInterrupt(), SystemExit), (BrokenPipeError(32, "Broken pipe"), QLoRAError),
])  # fmt: skip
def test_interruptions(error, raised):
    with pytest.raises(raised) as told, cli._with_hints():
        raise error
    if raised is SystemExit:
        assert told.value.code == 128 + signal.SIGINT
    else:
        assert "closed by the other end: Broken pipe" in str(told.value)


@pytest.mark.parametrize(("code", "supervised", "noted"), [
    (0, True, True), (None, True, True), (1, True, False), (130, True, False), (0, False, False),
])  # fmt: skip
def test_only_a_command_that_ended_well_says_so(monkeypatch, code, supervised, noted):
    done = []

    def run(journal):
        sys.exit(code)

    for name in ("end_if_hung", "guard_streams", "drop_unwritable"):
        monkeypatch.setattr(cli, name, lambda *given: None)
    monkeypatch.setattr(cli, "_run_command", run)
    monkeypatch.setattr(cli.warnings, "showwarning", None)
    monkeypatch.setattr(cli.driver, "listeners", [])
    monkeypatch.setattr("qlora_wgpu.mapped_files.map_listeners", [])
    journal = SimpleNamespace(
        note_done=lambda: done.append(1), note_under_way=None, note_mapped=None
    )
    with pytest.raises(SystemExit) as end:
        cli.run_command(journal if supervised else None)
    assert end.value.code == code and bool(done) == noted
    assert cli.driver.listeners == [None] * supervised


@pytest.mark.parametrize("found", [((), ()), ((), ("a card",)), (("a card",), ())])
def test_the_gpus_of_all_backends(monkeypatch, found, capsys):
    backends = [SimpleNamespace(name=name, package=name) for name in ("one", "two")]
    given = dict(zip(("one", "two"), found, strict=True))
    monkeypatch.setattr(doctor, "installed_backends", lambda: backends)
    monkeypatch.setattr(doctor, "version", lambda package: "1.0")
    monkeypatch.setattr(doctor, "list_adapters", lambda name: given[name])
    opened = []

    def device(*asked):
        opened.append(asked)
        raise DeviceError("opened")

    monkeypatch.setattr(doctor, "Device", device)
    monkeypatch.setattr(doctor, "no_gpu", lambda: DeviceError("there is none"))
    with pytest.raises(DeviceError) as told:
        doctor._list_gpus(doctor.Console(), "auto", "auto", quick=True)
    assert (str(told.value) == "opened") == any(found) == bool(opened)
    assert "one 1.0, two 1.0, Python" in " ".join(capsys.readouterr().out.split())

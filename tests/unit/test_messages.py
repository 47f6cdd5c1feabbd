"""How messages name options, values and packages."""

import errno

import pytest

from qlora_wgpu import errors, limits
from qlora_wgpu.errors import ConfigError, brief, on_command_line, option, reason, require_extra


def test_options_as_who_reads_of_them_writes_them():
    assert option("allow_code") == "allow_code=True" and option("out", ...) == "out=..."
    assert option("out", "a") == "out=a" and option("check", False) == "check=False"
    with on_command_line("qlora-wgpu train"):
        assert option("allow_code") == "--allow-code" and option("out", ...) == "--out"
        assert errors.command() == "qlora-wgpu train"
    assert errors.command() == ""


def test_the_system_s_reasons():
    assert reason(OSError(errno.ENOENT, "No such file", "a")) == "No such file"
    assert reason(ValueError("why")) == "why"


def test_values_are_bounded():
    assert brief("a") == "'a'" and len(brief("a" * 10_000)) < 500
    assert len(brief([[list(range(99))] * 99] * 99)) < 5000


@pytest.mark.parametrize(("missing", "says"), [
    ((), None), (("uvicorn",), "uvicorn is required for serve: pip install"),
    (("starlette", "uvicorn"), "starlette and uvicorn are required for serve: pip install"),
])  # fmt: skip
def test_packages_that_are_missing(monkeypatch, missing, says):
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in missing else name)
    if says is None:
        require_extra("serve")
        return
    with pytest.raises(ConfigError, match=says) as told:
        require_extra("serve")
    assert str(told.value).endswith('pip install "starlette>=0.40" "uvicorn>=0.30"')


def test_a_package_is_sought_by_the_name_that_python_imports(monkeypatch):
    asked = []
    monkeypatch.setattr(errors, "find_spec", asked.append)
    with pytest.raises(ConfigError, match="math-verify is required for the reward math_verify"):
        require_extra("math")
    assert asked == ["math_verify"]


def test_limits_that_are_documented():
    """Of files and data that worked so far; a lower one refuses somebody's."""
    assert (limits.MAX_DEPTH, limits.KIB, limits.GIB) == (64, 1 << 10, 1 << 30)

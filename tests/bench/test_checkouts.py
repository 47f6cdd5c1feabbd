"""Two checkouts are measured in turns, each with its own code."""

import json
import sys
from pathlib import Path

import pytest
from bench.parts import BENCHMARKS
from e2e.tiny import CONFIG

ROOT = BENCHMARKS.parent


@pytest.fixture
def checkouts(monkeypatch):
    """The script, as a run in its folder finds it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import checkouts

    yield checkouts
    del sys.modules["checkouts"]


def test_a_ratio_is_of_steps_of_one_round(checkouts):
    rounds = [{"this": 0.1, "other": 0.2}, {"this": 0.4, "other": 0.4}, {"this": 0.2, "other": 0.3}]
    found = checkouts.compared(rounds, 100)
    assert found["ratio"] == 1.5 and found["ratios"] == [1.0, 2.0]
    assert found["tokens_per_second"] == {"this": 500.0, "other": 333.3}
    assert found["spread"]["this"] == [250.0, 1000.0]


def test_kernels_that_one_lacks_have_no_ratio(checkouts):
    times = {
        "this": {"a": (2, 0.001), "b": (1, 0.004)},
        "other": {"a": (4, 0.002), "c": (1, 0.003)},
    }
    head, *lines = (line.split() for line in checkouts.kernel_lines(times))
    assert head[:5] == ["ms", "a", "step", "other", "this"]
    assert lines == [
        ["b", "0.000", "4.000", "-", "0", "and", "1"],
        ["c", "3.000", "0.000", "-", "1", "and", "0"],
        ["a", "2.000", "1.000", "2.00", "4", "and", "2"],
    ]


@pytest.mark.full
def test_each_measures_its_own_code(checkouts, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("qlora_wgpu", "shaders"):
        (other / name).symlink_to(ROOT / name, target_is_directory=True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [
        "checkouts.py", str(other), str(config), "--seq", "16", "--rounds", "2", "--steps", "1",
        "--json", str(result),
    ])  # fmt: skip
    checkouts.main()
    found = json.loads(result.read_text())
    packages = {name: Path(about["package"]) for name, about in found["about"].items()}
    assert packages == {
        "other": other / "qlora_wgpu" / "__init__.py", "this": ROOT / "qlora_wgpu" / "__init__.py"
    }  # fmt: skip
    assert found["last"]["this"]["loss"] == found["last"]["other"]["loss"]
    assert found["kernels"]["this"].keys() == found["kernels"]["other"].keys()
    assert found["ratios"][0] <= found["ratio"] <= found["ratios"][1]
    assert "round 2: other" in capsys.readouterr().out


def test_what_is_no_checkout_is_refused(checkouts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["checkouts.py", str(tmp_path), "S"])
    with pytest.raises(SystemExit):
        checkouts.main()
    assert "holds no qlora_wgpu" in capsys.readouterr().err

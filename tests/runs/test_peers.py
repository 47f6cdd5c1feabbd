"""Who may name another machine, which could run code here: the user, and no stranger's file."""

import pytest

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.runs.settings import TRUSTED, as_config, require_own_peers

SAFE = ["null", "local", "tls://127.0.0.1:8786", "tcp://localhost:8786"]


def check(file, overrides=()):
    require_own_peers(file, as_config(file, overrides), overrides)


@pytest.fixture
def write(tmp_path):
    def written(cluster):
        file = tmp_path / "run.yaml"
        file.write_text(f"{{model: {{path: m}}, data: {{train: d.jsonl}}, cluster: {cluster}}}")
        return file

    return written


@pytest.mark.parametrize("scheduler", SAFE)
def test_this_machine_may_be_named_by_a_file(write, scheduler):
    check(write(f"{{scheduler: '{scheduler}'}}".replace("'null'", "null")))


def test_another_machine_is_named_by_the_user(write, monkeypatch):
    file = write("{scheduler: 'tls://evil:8786'}")
    with pytest.raises(ConfigError, match=r"run\.yaml sets cluster\.scheduler=tls://evil"):
        check(file)
    check(file, ["cluster.scheduler=tls://mine:8786"])
    check(file, {"cluster.scheduler": "tls://mine:8786"})
    monkeypatch.setenv(TRUSTED, str(file.with_name("other.yaml")))
    with pytest.raises(ConfigError, match=TRUSTED):
        check(file)
    monkeypatch.setenv(TRUSTED, str(file))
    check(file)


def test_plain_tcp_is_allowed_by_the_user(write):
    file = write("{allow_plain_tcp: true}")
    named = "cluster.scheduler=tcp://gpu1:8786"
    with pytest.raises(ConfigError, match=r"sets cluster\.allow_plain_tcp=true"):
        check(file, [named])
    check(file, [named, "cluster.allow_plain_tcp=true"])


def test_settings_of_a_program_are_its_users():
    given = {
        "model": {"path": "m"}, "data": {"train": "d"}, "cluster": {"scheduler": "tls://gpu1:1"},
    }  # fmt: skip
    require_own_peers(given, as_config(given))

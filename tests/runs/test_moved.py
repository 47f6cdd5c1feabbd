"""A run resumed in another place finds its model and data by the ends of their paths."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError, on_command_line
from qlora_wgpu.runs.settings import as_config, relocate_paths
from qlora_wgpu.training import Observer


class Notes(Observer):
    def __init__(self):
        self.texts = []

    def note(self, text):
        self.texts.append(text)


def touch(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")


@pytest.fixture
def project(tmp_path):
    """A model, data, an adapter and a template, in folders of the project that the run is in."""
    project = tmp_path / "here"
    for name in (
        "bases/small/config.json", "data/train.jsonl", "data/chats/held.jsonl",
        "runs/begun/adapter_config.json", "own.jinja",
        "runs/first/checkpoints/step-3/manifest.json",
    ):  # fmt: skip
        touch(project / name)
    return project


def begun(project, **changes):
    """The settings of a run in a project that was in a folder that is gone."""
    gone = "/gone/poems"
    data = {"train": f"{gone}/data/train.jsonl", "eval": f"{gone}/data/chats:held[:10]"}
    sections = {
        "model": {"path": f"{gone}/bases/small"},
        "data": {**data, "chat_template": f"{gone}/own.jinja"},
        "lora": {"init_from": f"{gone}/runs/begun"},
        "output": {"dir": str(project / "runs" / "first")},
    }
    return Config.model_validate({**sections, **changes})


def test_the_ends_of_paths_are_found_around_the_run(project):
    notes = Notes()
    found = relocate_paths(begun(project), notes)
    assert found.model.path == str(project / "bases" / "small")
    assert found.data.train == str(project / "data" / "train.jsonl")
    assert found.data.eval == str(project / "data" / "chats") + ":held[:10]"
    assert found.data.chat_template == str(project / "own.jinja")
    assert found.lora.init_from == str(project / "runs" / "begun")
    assert len(notes.texts) == 5
    assert "model.path: /gone/poems/bases/small does not exist" in notes.texts[0]


def test_the_current_folder_is_looked_in(project, tmp_path, monkeypatch):
    shutil.move(project / "bases" / "small", tmp_path / "else" / "small")
    monkeypatch.chdir(tmp_path / "else")
    assert relocate_paths(begun(project), Notes()).model.path == str(tmp_path / "else" / "small")


def test_paths_of_windows(project):
    settings = begun(project, model={"path": "D:\\poems\\bases\\small"})
    assert relocate_paths(settings, Notes()).model.path == str(project / "bases" / "small")


def test_sources_are_found_one_by_one(project):
    there = str(project / "data" / "chats")
    sources = [{"path": "/gone/data/train.jsonl"}, {"path": there}, {"path": "owner/name:train"}]
    found = relocate_paths(begun(project, data={"sources": sources}), Notes()).data.sources
    expected = [str(project / "data" / "train.jsonl"), there, "owner/name:train"]
    assert [source.path for source in found] == expected


def test_a_reward_model_is_found_and_its_run_resumes(project):
    """Another folder of the same name is the same setting; code is not searched."""

    def settings(folder):
        functions = [{"reward_model": f"{folder}/runs/begun"}, f"{folder}/own.py:brief", "json"]
        return begun(project, train={"objective": "grpo"}, grpo={"reward_funcs": functions})

    touch(project / "own.py")
    notes = Notes()
    found = relocate_paths(settings("/gone"), notes)
    expected = [
        {"reward_model": {"path": str(project / "runs/begun")}},
        "/gone/own.py:brief",
        "json",
    ]
    assert found.grpo.reward_funcs == expected
    assert any("grpo.reward_funcs: /gone/runs/begun does not exist" in text for text in notes.texts)
    before = settings("/gone").fixed_settings()
    assert before == settings("/new").fixed_settings()
    other = begun(project, train={"objective": "grpo"}, grpo={"reward_funcs": ["json"]})
    assert before != other.fixed_settings()


def test_a_folder_of_that_name_that_holds_no_model_is_none(project):
    (project / "bases" / "small" / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"was trained with model\.path /gone/poems/bases/small, "
    ):
        relocate_paths(begun(project), Notes())


def test_all_that_is_nowhere_is_named_at_once(project):
    shutil.rmtree(project / "bases")
    (project / "data" / "train.jsonl").unlink()
    what = (
        "trained with model.path /gone/poems/bases/small and data.train "
        "/gone/poems/data/train.jsonl, which do not exist: if they have moved, "
    )
    with on_command_line("qlora-wgpu train"), pytest.raises(ConfigError) as told:
        relocate_paths(begun(project), Notes())
    assert what + "add model.path=PATH data.train=PATH; the contents must" in str(told.value)
    with pytest.raises(ConfigError, match=r"moved, set model\.path and data\.train; the con"):
        relocate_paths(begun(project), Notes())


def test_nothing_is_guessed_for_a_run_that_has_no_checkpoint(project):
    """Nothing would say whether it is the same."""
    shutil.rmtree(project / "runs" / "first" / "checkpoints")
    settings, notes = begun(project), Notes()
    assert relocate_paths(settings, notes) == settings and not notes.texts


def test_what_is_there_stays(project, tmp_path):
    touch(tmp_path / "far" / "small" / "config.json")
    far = str(tmp_path / "far" / "small")
    assert relocate_paths(begun(project, model={"path": far}), Notes()).model.path == far


def test_a_run_is_named_by_its_folder(project):
    run = project / "runs" / "first"
    (run / "config.yaml").write_text(begun(project).to_yaml().replace(str(run), "/gone/run"))
    with pytest.raises(ConfigError, match="use the YAML file in it"):
        as_config(run)  # there is no log that a run begins with
    touch(run / "metrics.jsonl")
    settings = as_config(run, ["train.max_steps=9"])
    assert Path(settings.output.dir) == run and settings.train.max_steps == 9
    assert as_config(run, {"output.dir": "another"}).output.dir == "another"
    assert as_config(run, ["output.dir=/another"]).output.dir == "/another"

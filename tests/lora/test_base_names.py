"""When an adapter is opened on a base of another name, and when a name is the same one."""

import warnings

import pytest

from qlora_wgpu.lora.compatibility import is_other_name, warn_of_other_name


@pytest.mark.parametrize(
    ("named", "base"),
    [
        (None, "models/any"),
        ("", "models/any"),
        (".", "models/any"),
        ("..", "models/any"),
        ("org/Llama-3.2-1B", "org/Llama-3.2-1B"),
        ("org/Llama-3.2-1B", "/data/models/llama-3.2-1b/"),
        ("org/Llama-3.2-1B@v1", "models/Llama-3.2-1B"),
        ("C:\\models\\Llama-3.2-1B", "org/Llama-3.2-1B"),
        ("unsloth/llama-3.2-1b-unsloth-bnb-4bit", "meta-llama/Llama-3.2-1B"),
        ("org/Llama-3.2-1B", "org/Llama-3.2-1B-GGUF/Llama-3.2-1B-Q4_K_M.gguf"),
        ("org/Llama-3.2-1B", "Llama-3.2-1B.f16-00001-of-00003.gguf"),
        ("TheBloke/Llama-2-7B-GPTQ", "meta-llama/Llama-2-7b-hf"),
        ("/c/hub/models--org--Llama-3.2-1B/snapshots/0123abc", "org/Llama-3.2-1B"),
        ("org/Llama-3.2-1B", "/c/hub/models--org--Llama-3.2-1B/snapshots/0123abc/"),
    ],
)
def test_the_same_model(named, base):
    assert not is_other_name(named, base)


@pytest.mark.parametrize(
    ("named", "base"),
    [
        ("org/Llama-3.2-1B-Instruct", "org/Llama-3.2-1B"),
        ("org/Llama-3.2-1B", "org/Llama-3.2-3B-bnb-4bit"),
        ("runs/first/merged", "models/base"),
        ("models/bf16", "models/f16"),
    ],
)
def test_another_model(named, base):
    assert is_other_name(named, base) and is_other_name(base, named)


def test_the_working_directory_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "one" / "within").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    assert not is_other_name("org/one", ".") and is_other_name("org/two", ".")
    monkeypatch.chdir("within")
    assert not is_other_name("org/within", ".") and is_other_name("org/two", "..")


def test_a_link_is_the_folder_that_it_leads_to(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to("one")
    assert not is_other_name(str(tmp_path / "one"), tmp_path / "two")


def test_it_is_told_once(tmp_path):
    with pytest.warns(UserWarning, match="adapter was trained on org/one and is opened on org/two"):
        warn_of_other_name(tmp_path / "adapter", "org/one", "org/two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_name(tmp_path / "adapter", "org/one", "org/two")
    with pytest.warns(UserWarning):
        warn_of_other_name(tmp_path / "adapter", "org/one", "org/three")

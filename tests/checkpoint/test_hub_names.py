"""Names on the hub, without a network: what is asked of the client, and what its errors become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from qlora_wgpu.checkpoint import ModelFolder, hub
from qlora_wgpu.errors import CheckpointError

NAME = "owner/model-1.5B"


@pytest.mark.parametrize("name", [NAME, "HuggingFaceTB/SmolLM2-135M", "a/b", "A_b/c.d", "1/2"])
def test_hub_names(name: str) -> None:
    assert hub.is_hub_name(name)


@pytest.mark.parametrize(
    "text",
    [
        *("", "model", "/abs/path", "./owner/model", "../model", "owner/", "/model", "a/b/c"),
        *("owner\\model", "owner/model/", "own er/model", "owner/mod..el", "a/../b", "owner/é"),
        *("C:/model", ".hidden/model", "owner/.model", "~/model", "a/b\n", "a/" + "b" * 97),
    ],
)
def test_what_are_no_hub_names(text: str) -> None:
    assert not hub.is_hub_name(text)


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3", "it-mid-training", "0123abc"])
def test_a_name_with_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    calls = answer(monkeypatch, tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"cache has no config\.json"):
        ModelFolder.open(f"{NAME}@{revision}")
    assert [(name, options["revision"]) for name, options in calls] == [(NAME, revision)]
    assert hub.name_on_hub(f"{NAME}@{revision}") == NAME


@pytest.mark.parametrize("text", [f"{NAME}@", f"{NAME}@ v1", "model@v1", f"{NAME}@-v", f"@{NAME}"])
def test_what_are_no_revisions(text: str) -> None:
    assert not hub.is_hub_model(text) and hub.name_on_hub(text) is None


def test_a_revision_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, http_error(errors.RevisionNotFoundError, "404\nlong"))
    with pytest.raises(CheckpointError) as caught:
        hub.download(f"{NAME}@v9")
    assert str(caught.value) == (
        f"{NAME}@v9 cannot be downloaded: {NAME} on the Hugging Face Hub has no revision "
        "'v9'; its page lists branches, tags and commits under Files"
    )


def answer(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[tuple[str, dict[str, Any]]]:
    calls = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        if isinstance(result, BaseException):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer(monkeypatch, tmp_path)
    assert hub.download(NAME) == tmp_path
    [(name, options)] = calls
    assert name == NAME
    assert options.pop("tqdm_class").__name__ == "DownloadBar"
    assert options.pop("revision") is None
    kept = set(
        huggingface_hub.utils.filter_repo_objects(
            [
                *("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"),
                *("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
                *("tokenizer.model", "pytorch_model.bin", "original/params.json", "onnx/m.onnx"),
                *("consolidated.safetensors", "model.gguf", "README.md", "original/x.safetensors"),
            ],
            **options,
        )
    )
    assert kept == {
        *("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"),
        *("model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.model"),
    }


def test_a_name_that_is_no_folder_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    calls = answer(monkeypatch, tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"cache has no config\.json"):
        ModelFolder.open(NAME)
    assert [name for name, _ in calls] == [NAME]


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    calls = answer(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"owner.model-1\.5B has no config\.json"):
        ModelFolder.open(NAME)
    assert calls == []


def http_error(kind: type[Exception], message: str) -> Exception:
    """Without the response of whichever HTTP client this version of the hub's library uses."""
    return kind.__new__(kind, message)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lambda: http_error(errors.GatedRepoError, "403\nlong"), "it is gated: accept its terms"),
        (
            lambda: http_error(errors.RepositoryNotFoundError, "404\nlong"),
            "is neither a local folder nor",
        ),
        (lambda: errors.LocalEntryNotFoundError("offline\nlong"), "Hub cannot be reached"),
        (lambda: ConnectionError("500 Server\nlong"), "failed: 500 Server"),
        (lambda: errors.OfflineModeIsEnabled("offline"), "offline"),
        (lambda: OSError(28, "No space left on device"), "No space left on device"),
        (lambda: ValueError(), "failed: ValueError"),
    ],
)
def test_errors_become_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Any, expected: str
) -> None:
    answer(monkeypatch, error())
    with pytest.raises(CheckpointError) as caught:
        hub.download(NAME)
    assert str(caught.value).startswith(NAME)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_interrupt_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hub.download(NAME)


def test_offline_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told that it is offline, with an empty cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=f"^{NAME} is neither .* cannot be reached"):
        ModelFolder.open(NAME)

"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from qlora_wgpu.checkpoint.gguf.file import part_names, split_name
from qlora_wgpu.checkpoint.hub_progress import waiting_bars
from qlora_wgpu.errors import CheckpointError
from qlora_wgpu.presence import exists, is_dir

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]{0,199}", re.ASCII)  # a branch, a tag or a commit
_FOLDER = re.compile(r"[\w.+-]{1,200}", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_WEIGHTS = ["*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]  # other exports of the same weights, as large again


def is_hub_name(text: str) -> bool:
    """Whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def is_hub_model(text: str) -> bool:
    """Whether a text has the form owner/name or owner/name@REVISION."""
    name, at, revision = text.partition("@")
    return is_hub_name(name) and (not at or _REVISION.fullmatch(revision) is not None)


def owner_wanted(text: str) -> str:
    """What a sentence about a model that is nowhere ends with: a hub's name, if it may be one."""
    plain = _FOLDER.fullmatch(text) and text.strip(".") and not text.endswith(".gguf")
    return f"one of the hub is named with its owner, such as OWNER/{text}" if plain else ""


def name_on_hub(base: str | None) -> str | None:
    """A base's name without its revision, if it is one of the hub and no folder of the user's."""
    known = base is not None and is_hub_model(base) and not is_dir(Path(base))
    return base.partition("@")[0] if base is not None and known else None


def is_hub_file(text: str) -> bool:
    """Whether a text has the form owner/name/FILE.gguf, the file maybe in folders."""
    parts = text.split("/")
    named = "/".join(parts[:2])
    return (
        len(parts) > 2
        and text.endswith(".gguf")
        and is_hub_name(named)
        and all(_FOLDER.fullmatch(part) and ".." not in part for part in parts[2:])
    )


def download_file(name: str) -> Path:
    """A model's GGUF file in the local cache, downloaded if it is not there yet, with all parts.

    Args:
        name: owner/name/FILE.gguf.

    Raises:
        CheckpointError: If there is no such file, it is not open to the user, or the hub cannot be
            reached.
    """
    owner, repository, *folders, file = name.split("/")
    split = split_name(file)
    names = [file] if split is None else part_names(*split)
    paths = ["/".join([*folders, each]) for each in names]
    root = _snapshot(f"{owner}/{repository}", name, paths)
    if not exists(root / paths[0]):
        raise CheckpointError(
            f"the model {owner}/{repository} of the Hugging Face hub has no file {paths[0]}: its "
            "page lists them under Files"
        )
    return root / paths[0]


def download(name: str, *, weights: bool = True) -> Path:
    """The folder of a hub's model in the local cache, downloaded if it is not there yet.

    Args:
        name: owner/name, or owner/name@REVISION.
        weights: Whether its weights are wanted, too.

    Raises:
        CheckpointError: If there is no such model or revision, it is not open to the user, or the
            hub cannot be reached.
    """
    unwanted = _UNWANTED if weights else [*_UNWANTED, *_WEIGHTS]
    repository, _, revision = name.partition("@")
    return _snapshot(repository, name, _WANTED, unwanted, revision or None)


def _snapshot(
    repository: str,
    name: str,
    wanted: list[str],
    unwanted: list[str] | None = None,
    revision: str | None = None,
) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with waiting_bars(name) as bars:
            return Path(
                huggingface_hub.snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=wanted,
                    ignore_patterns=unwanted,
                    tqdm_class=bars,
                )
            )
    except errors.GatedRepoError as err:
        reason = "it is gated: accept its terms on its page and log in with `hf auth login`"
        raise CheckpointError(f"{name} cannot be downloaded: {reason}") from err
    except errors.RepositoryNotFoundError as err:
        raise CheckpointError(
            f"{name} is neither a folder nor a model on the Hugging Face hub "
            "(a private one needs `hf auth login`)"
        ) from err
    except errors.RevisionNotFoundError as err:
        raise CheckpointError(
            f"{name} cannot be downloaded: the model {repository} of the Hugging Face hub has no "
            f"revision {revision!r}; its page lists branches, tags and commits under Files"
        ) from err
    except errors.LocalEntryNotFoundError as err:
        raise CheckpointError(
            f"{name} is not a folder, and as a model of the Hugging Face hub it is not in the "
            "local cache and the hub cannot be reached: check the path or the network"
        ) from err
    except Exception as err:  # every other failure of the client or of the network
        reason = next(iter(str(err).splitlines()), "") or type(err).__name__
        raise CheckpointError(
            f"{name} is not a folder, and downloading it from the Hugging Face hub failed: {reason}"
        ) from err

"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from qlora_wgpu.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_WEIGHTS = ["*.safetensors"]
_UNWANTED = ["*/*", "consolidated*"]  # other exports of the same weights, as large again


def is_hub_name(text: str) -> bool:
    """Whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def download(name: str, *, weights: bool = True) -> Path:
    """The folder of a hub's model in the local cache, downloaded if it is not there yet.

    Args:
        name: owner/name.
        weights: Whether its weights are wanted, too.

    Raises:
        CheckpointError: If there is no such model, it is not open to the user, or the hub cannot be
            reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED if weights else [*_UNWANTED, *_WEIGHTS],
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
    except errors.LocalEntryNotFoundError as err:
        raise CheckpointError(
            f"{name} is no folder, and as a model of the Hugging Face hub it is not in the local "
            "cache and the hub cannot be reached: check the path or the network"
        ) from err
    except Exception as err:  # every other failure of the client or of the network
        reason = next(iter(str(err).splitlines()), "") or type(err).__name__
        raise CheckpointError(
            f"{name} is no folder, and downloading it from the Hugging Face hub failed: {reason}"
        ) from err

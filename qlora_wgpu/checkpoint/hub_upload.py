"""Files to the Hugging Face hub, and to nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from qlora_wgpu.errors import CheckpointError, ConfigError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def check_reachable() -> None:
    """Makes sure that the hub may be written to from here, before anything is done for it.

    Raises:
        ConfigError: If the hub's client is switched off, nobody is logged in, or a token would
            travel in the clear.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            "HF_HUB_OFFLINE is set, so nothing is sent to the hub: unset it to push, or copy the "
            "files yourself"
        )
    address = urlsplit(constants.ENDPOINT)
    if address.scheme != "https" and address.hostname not in _THIS_MACHINE:
        raise ConfigError(
            f"HF_ENDPOINT is {constants.ENDPOINT}, where your token would travel in the clear: "
            "use https"
        )
    if not get_token():
        raise ConfigError("nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN")


def upload(name: str, files: Mapping[str, Path | bytes], *, private: bool) -> str:
    """Puts files into a model repository of the hub, which is made if it is not there.

    Args:
        name: owner/name.
        files: A path or the content of each file, by its path in the repository.
        private: Whether a new repository is seen by its owner alone; one that is there stays as it
            is.

    Returns:
        The address of its page.

    Raises:
        CheckpointError: If the hub refuses it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    changes = [
        CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in files.items()
    ]
    try:
        page = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(name, changes, commit_message="Upload with qlora-wgpu")
    except Exception as err:  # whatever the client or the network has
        reason = next(iter(str(err).splitlines()), "") or type(err).__name__
        raise CheckpointError(f"{name} cannot be written on the hub: {reason}") from err
    return str(page)

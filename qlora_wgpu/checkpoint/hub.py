"""Models by their name on the Hugging Face hub, down and up."""

from __future__ import annotations

import io
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from qlora_wgpu.checkpoint.gguf_file import part_names, split_name
from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.files import exists, is_dir

# ---- progress bars -------------------------------------------------------------------------------

_DELAY = 1.0  # seconds: what is in the local cache already is looked through in less
_BETWEEN_LINES = 15.0  # seconds


@contextmanager
def waiting_bars(name: str) -> Iterator[type[Any]]:
    """A class of bars for the hub's client, with which it downloads ``name``.

    They show nothing for a second and leave nothing. Where no bar can be drawn, in a file or beside
    another one, there is a line now and then.

    After Ctrl-C the client waits for all files that its threads have begun, which may take an hour:
    here each of them ends at its next piece.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    bars: list[Any] = []
    stopped = threading.Event()
    draws = sys.stderr.isatty() and not hasattr(sys.stderr, "rich_proxied_file")
    lines = {} if draws else {"file": io.StringIO(), "disable": False}

    class WaitingBar(tqdm):
        told_at = 0.0  # of all bars of a download

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                *args, **{**options, **lines, "delay": _DELAY, "leave": False}
            )
            bars.append(self)

        def display(self, *args: Any, **options: Any) -> None:
            # What refreshes a bar does not look at its delay.
            if (now := self._time()) < self.start_t + self.delay:
                return
            if draws:
                super().display(*args, **options)
            elif now >= WaitingBar.told_at + _BETWEEN_LINES and self.total and not self.disable:
                WaitingBar.told_at = now
                sys.stderr.write(f"downloading {name}: {self._amounts()}\n")

        def _amounts(self) -> str:
            if self.unit != "B":
                return f"{self.n} of {self.total} files"
            return " of ".join(f"{self.format_sizeof(n)}B" for n in (self.n, self.total))

        def update(self, *args: Any) -> Any:
            if stopped.is_set():
                raise KeyboardInterrupt
            return super().update(*args)

    try:
        with _told_of_interrupts(stopped):
            yield WaitingBar
    finally:
        for bar in reversed(bars):  # the client leaves some open
            bar.close()


@contextmanager
def _told_of_interrupts(event: threading.Event) -> Iterator[None]:
    """Sets an event at Ctrl-C, and does what is done at it anyway."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        event.set()
        before(number, frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- names ---------------------------------------------------------------------------------------

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


# ---- down ----------------------------------------------------------------------------------------


def download_file(name: str) -> Path:
    """A model's GGUF file in the local cache, downloaded if it is not there yet, with all parts."""
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
    """The folder of a hub's model in the local cache, downloaded if it is not there yet."""
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


# ---- up ------------------------------------------------------------------------------------------

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def check_reachable() -> None:
    """Makes sure that the hub may be written to from here, before anything is done for it."""
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
    """Puts files into a model repository of the hub, which is made if it is not there."""
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

"""Models on the Hugging Face Hub: downloads and uploads."""

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

_DELAY = 1.0  # seconds: a model in the local cache takes less
_LINE_INTERVAL = 15.0  # seconds


@contextmanager
def download_bars(name: str) -> Iterator[type[Any]]:
    """A class of progress bars for the Hub's client while it downloads ``name``.

    They appear after a second and are removed at the end. If no bar can be drawn, in a file or next
    to another bar, a line is printed every 15 seconds.

    After Ctrl-C the client would finish all files that its threads have started, which may take an
    hour: with these bars each thread stops at its next chunk.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    bars: list[Any] = []
    stopped = threading.Event()
    draws = sys.stderr.isatty() and not hasattr(sys.stderr, "rich_proxied_file")
    lines = {} if draws else {"file": io.StringIO(), "disable": False}

    class DownloadBar(tqdm):
        printed_at = 0.0  # by any bar of the download

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                *args, **{**options, **lines, "delay": _DELAY, "leave": False}
            )
            bars.append(self)

        def display(self, *args: Any, **options: Any) -> None:
            # Refreshing a bar ignores its delay.
            if (now := self._time()) < self.start_t + self.delay:
                return
            if draws:
                super().display(*args, **options)
            elif now >= DownloadBar.printed_at + _LINE_INTERVAL and self.total and not self.disable:
                DownloadBar.printed_at = now
                amounts = f"{self.n} of {self.total} files"
                if self.unit == "B":
                    amounts = " of ".join(f"{self.format_sizeof(n)}B" for n in (self.n, self.total))
                sys.stderr.write(f"downloading {name}: {amounts}\n")

        def update(self, *args: Any) -> Any:
            if stopped.is_set():
                raise KeyboardInterrupt
            return super().update(*args)

    try:
        with _set_at_interrupt(stopped):
            yield DownloadBar
    finally:
        for bar in reversed(bars):  # the client leaves some open
            bar.close()


@contextmanager
def _set_at_interrupt(event: threading.Event) -> Iterator[None]:
    """Sets an event at Ctrl-C, before the usual handler runs."""
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
_WEIGHTS = ["*.safetensors"]
_VOCABULARIES = ["tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_ALLOWED = ["*.json", *_WEIGHTS, "*.jinja", *_VOCABULARIES]
_IGNORED = ["*/*", "consolidated*"]  # other exports of the same weights


def is_hub_name(text: str) -> bool:
    """Whether a text has the form owner/name."""
    return _NAME.fullmatch(text) is not None and ".." not in text and "--" not in text


def is_hub_model(text: str) -> bool:
    """Whether a text has the form owner/name or owner/name@REVISION."""
    name, at, revision = text.partition("@")
    return is_hub_name(name) and (not at or _REVISION.fullmatch(revision) is not None)


def owner_hint(text: str) -> str:
    """The end of a message about a model that does not exist: that Hub names have an owner."""
    plain = _FOLDER.fullmatch(text) and text.strip(".") and not text.endswith(".gguf")
    return f"names on the Hugging Face Hub have an owner, such as OWNER/{text}" if plain else ""


def name_on_hub(base: str | None) -> str | None:
    """A base's Hub name without its revision; None if it is a local folder."""
    known = base is not None and is_hub_model(base) and not is_dir(Path(base))
    return base.partition("@")[0] if base is not None and known else None


def is_hub_file(text: str) -> bool:
    """Whether a text has the form owner/name/FILE.gguf, or has folders before the file."""
    parts = text.split("/")
    named = "/".join(parts[:2])
    return (
        len(parts) > 2
        and text.endswith(".gguf")
        and is_hub_name(named)
        and all(_FOLDER.fullmatch(part) and ".." not in part for part in parts[2:])
    )


# ---- downloads -----------------------------------------------------------------------------------


def download_file(name: str) -> Path:
    """A model's GGUF file in the local cache, downloaded with all its parts if needed."""
    owner, repository, *folders, file = name.split("/")
    split = split_name(file)
    names = [file] if split is None else part_names(*split)
    paths = ["/".join([*folders, each]) for each in names]
    root = _snapshot(f"{owner}/{repository}", name, paths)
    if not exists(root / paths[0]):
        raise CheckpointError(
            f"{owner}/{repository} on the Hugging Face Hub has no file {paths[0]}: see Files on "
            "its page"
        )
    return root / paths[0]


def download(name: str, *, weights: bool = True) -> Path:
    """A Hub model's folder in the local cache, downloaded if needed."""
    ignored = _IGNORED if weights else [*_IGNORED, *_WEIGHTS]
    repository, _, revision = name.partition("@")
    return _snapshot(repository, name, _ALLOWED, ignored, revision or None)


def _snapshot(
    repository: str,
    name: str,
    allowed: list[str],
    ignored: list[str] | None = None,
    revision: str | None = None,
) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with download_bars(name) as bars:
            return Path(
                huggingface_hub.snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=allowed,
                    ignore_patterns=ignored,
                    tqdm_class=bars,
                )
            )
    except errors.GatedRepoError as err:
        reason = "it is gated: accept its terms on its page and log in with `hf auth login`"
        raise CheckpointError(f"{name} cannot be downloaded: {reason}") from err
    except errors.RepositoryNotFoundError as err:
        raise CheckpointError(
            f"{name} is neither a local folder nor a model on the Hugging Face Hub "
            "(a private one needs `hf auth login`)"
        ) from err
    except errors.RevisionNotFoundError as err:
        raise CheckpointError(
            f"{name} cannot be downloaded: {repository} on the Hugging Face Hub has no revision "
            f"{revision!r}; its page lists branches, tags and commits under Files"
        ) from err
    except errors.LocalEntryNotFoundError as err:
        raise CheckpointError(
            f"{name} is neither a local folder nor in the local cache, and the Hugging Face Hub "
            "cannot be reached: check the path or the network"
        ) from err
    except Exception as err:  # any other failure of the client or the network
        raise CheckpointError(
            f"{name} is not a local folder, and downloading it from the Hugging Face Hub failed: "
            f"{_reason(err)}"
        ) from err


def _reason(err: Exception) -> str:
    return next(iter(str(err).splitlines()), "") or type(err).__name__


# ---- uploads -------------------------------------------------------------------------------------

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


def check_reachable() -> None:
    """Raises a ConfigError if uploading is impossible, before anything is prepared for it."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded to the Hub: unset it, or copy the "
            "files yourself"
        )
    address = urlsplit(constants.ENDPOINT)
    if address.scheme != "https" and address.hostname not in _THIS_MACHINE:
        raise ConfigError(
            f"HF_ENDPOINT is {constants.ENDPOINT}, to which your token would be sent unencrypted: "
            "use https"
        )
    if not get_token():
        raise ConfigError("not logged in to the Hub: run `hf auth login`, or set HF_TOKEN")


def upload(name: str, files: Mapping[str, Path | bytes], *, private: bool) -> str:
    """Uploads files to a model repository, which is created if needed; returns its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    changes = [
        CommitOperationAdd(path, content if isinstance(content, bytes) else str(content))
        for path, content in files.items()
    ]
    try:
        page = api.create_repo(name, private=private, exist_ok=True)
        api.create_commit(name, changes, commit_message="Upload with qlora-wgpu")
    except Exception as err:  # any failure of the client or the network
        raise CheckpointError(f"cannot upload to {name}: {_reason(err)}") from err
    return str(page)

"""Files that stand where weights should be, recognized by their first bytes."""

from __future__ import annotations

LFS_PREFIX = b"version https://git-lfs"

_KINDS = (
    (LFS_PREFIX, "is a Git LFS pointer, not the weights: run git lfs pull"),
    (b"PK\x03\x04", "is a PyTorch or zip file, not safetensors: save the model as safetensors"),
    (b"\x80\x02", "is a PyTorch pickle, not safetensors: save the model as safetensors"),
    (
        b"GGUF",
        "is a GGUF file, not safetensors: name it NAME.gguf, and give the file itself",
    ),
    (b"<", "is a web page, not the weights: download it again, logged in if the model asks for it"),
)


def what_it_is(start: bytes) -> str | None:
    """The end of a sentence about a file that is not a safetensors file, or None if it may be one.

    Args:
        start: The first bytes; 64 are enough. A safetensors file starts with the length of its
            header, 8 bytes of which the last four are zero, so none can be mistaken.
    """
    for prefix, kind in _KINDS:
        if start.lstrip().startswith(prefix) and start[4:8] != bytes(4):
            return kind
    return None

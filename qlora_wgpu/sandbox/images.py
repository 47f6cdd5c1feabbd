"""Untrusted image files, decoded by Pillow in a child process.

``qlora_wgpu.images.decoder`` calls these functions there. Only formats without interpreters of
their own are read, and only their first frame.
"""

from __future__ import annotations

import base64
import importlib
import io
import warnings

from PIL import Image, ImageFile, ImageOps

from qlora_wgpu.errors import DataError
from qlora_wgpu.limits import IMAGE_PIXELS

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
_LATE = (b"eXIf", b"tiff:Orientation")  # what PNG may have after the pixels
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)
_PIECE = 8 << 20  # bytes of pixels that are returned at once

# What Pillow loads lazily: the child cannot open files afterwards.
Image.init()
for _module in ("copy", "PIL.ImageCms", "PIL.ImageColor", "PIL.ImageFilter", "PIL.ImagePalette"):
    importlib.import_module(_module)
ImageFile.LOAD_TRUNCATED_IMAGES = False
Image.MAX_IMAGE_PIXELS = None  # ``_opened`` has a limit, and an error of its own
_decoded: Image.Image | None = None  # the latest one


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width of an image as it is meant to be seen, from its header if possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _opened(content)
        has_late = image.format == "PNG" and any(mark in content for mark in _LATE)
        if has_late or image.format == "TIFF":  # Pillow turns TIFF images as it loads them
            _load(image)
        width, height = image.size
        is_turned = image.getexif().get(_ORIENTATION) in _TURNED if _has_exif(image) else False
    return (width, height) if is_turned else (height, width)


def decode(content: bytes) -> tuple[int, int]:
    """Decodes an image to RGB as transformers' ``load_image`` does; its height and width."""
    global _decoded
    _decoded = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _opened(content)
        _load(image)
        ImageOps.exif_transpose(image, in_place=True)
        _decoded = image if image.mode == "RGB" else image.convert("RGB")
    return image.height, image.width


def pixels(first: int) -> str:
    """Some rows of the decoded image from the ``first`` in base 64; empty after the last one."""
    assert _decoded is not None
    last = min(first + max(_PIECE // (3 * _decoded.width), 1), _decoded.height)
    rows = _decoded.crop((0, first, _decoded.width, last)).tobytes() if first < last else b""
    return base64.b64encode(rows).decode("ascii")


def _has_exif(image: Image.Image) -> bool:
    """Whether reading the orientation needs no pixels: Pillow would decode a PNG for it."""
    return image.format != "PNG" or not {"exif", "xmp", "XML:com.adobe.xmp"}.isdisjoint(image.info)


def _opened(content: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    except MemoryError:
        raise
    except Exception as err:  # plugins raise anything on damaged files
        raise DataError(
            "it is not an image of a supported format, or it is damaged (supported: JPEG, PNG, "
            "GIF, WebP, BMP, TIFF, PPM)"
        ) from err
    width, height = image.size
    if width * height > IMAGE_PIXELS:
        raise DataError(
            f"it has {width:,} x {height:,} pixels, more than {IMAGE_PIXELS:,} in total: make it "
            "smaller"
        )
    return image


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as err:
        raise DataError(f"it is damaged: {err}") from err

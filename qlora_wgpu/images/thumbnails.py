"""Small copies of images for pages."""

from __future__ import annotations

import base64
import io

from qlora_wgpu.errors import DataError
from qlora_wgpu.images.sources import ImageSource

SIDE = 192  # pixels of the longer side, at most
_QUALITY = 80  # of JPEG


def thumbnail(image: ImageSource) -> str:
    """A ``data:`` URI of a small JPEG image; empty if the image cannot be read any more."""
    try:
        rgb = image.decoded()
    except DataError:
        return ""
    from PIL import Image

    small, file = Image.fromarray(rgb), io.BytesIO()
    small.thumbnail((SIDE, SIDE))
    small.save(file, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode("ascii")

"""Image files are decoded in the child process as Pillow and transformers do, within limits."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from qlora_wgpu.errors import DataError
from qlora_wgpu.images.sources import ImageSource, RowContent, decode_image, image_size

MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "RGBA", "P", "LA", "1", "I;16"),
    "GIF": ("P", "L"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "L"),
    "TIFF": ("RGB", "L", "RGBA"),
    "PPM": ("RGB",),
}
ORIENTATIONS = {"JPEG": (1, 3, 6, 5), "PNG": (6, 8), "WEBP": (6,), "TIFF": (6, 5)}
PIXELS = np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8)


def image(mode="RGB"):
    rgb = Image.fromarray(PIXELS)
    return rgb.convert("L").convert("I;16") if mode == "I;16" else rgb.convert(mode)


def content(form, mode="RGB", orientation=None, **options):
    file = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif if form == "TIFF" else exif.tobytes()
    image(mode).save(file, form, **options)
    return file.getvalue()


def expected(data):
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


@pytest.mark.parametrize("form", MODES)
def test_pixels_are_those_of_pillow(form):
    files = [content(form, mode) for mode in MODES[form]]
    files += [content(form, orientation=each) for each in ORIENTATIONS.get(form, ())]
    for data in files:
        assert image_size(data) == expected(data).shape[:2]
        assert np.array_equal(decode_image(data), expected(data))


def test_an_orientation_after_the_pixels_of_a_png_counts():
    data = content("PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    body = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    late = data[:-12] + chunk + data[-12:]
    assert image_size(late) == decode_image(late).shape[:2] == (53, 37)


def test_the_first_frame_of_an_animation_is_read():
    file = io.BytesIO()
    image("P").save(file, "GIF", save_all=True, append_images=[Image.new("P", (53, 37))])
    assert np.array_equal(decode_image(file.getvalue()), expected(file.getvalue()))


@pytest.mark.slow
def test_what_is_no_image_or_too_large_is_one_sentence():
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    whole = content("JPEG")
    for data, message in (
        (b"", "it is not an image of a supported format, or it is damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "it is not an image of a supported format"),
        (whole[:60], "it is not an image of a supported format, or it is damaged"),
        (whole[:-300], "it is damaged: image file is truncated"),
        (bomb.getvalue(), "it has 20,000 x 20,000 pixels, more than 50,000,000 in total"),
    ):
        with pytest.raises(DataError, match=f"^cannot read a.png: {message}") as error:
            ImageSource("a.png", RowContent(data)).decoded()
        assert "\n" not in str(error.value)

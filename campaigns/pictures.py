"""Hostile pictures: each is decoded as Pillow and transformers do, or refused in one sentence.

Pictures of all formats and modes, damaged, enormous or wrongly described, are referred to in every
way in which a row can, and then cut into what a random model family reads.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps
from support.image_models import FAMILIES, folder_of

from campaigns.support import Tally, campaign, peak_bytes
from qlora_wgpu.data import Tokenizer
from qlora_wgpu.errors import DataError
from qlora_wgpu.images.placeholders import ImageFiles
from qlora_wgpu.images.sources import ImageSource, image_source
from qlora_wgpu.limits import IMAGE_BYTES, IMAGE_PIXELS

SECONDS, GROWTH = 60.0, 1 << 30  # of a picture at most, and of this process
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
_PROCESSED = 300_000  # pixels, at most
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "RGBA", "P", "LA", "1", "I;16", "I"),
    "GIF": ("P", "L", "1", "RGB"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "L", "1", "P"),
    "TIFF": ("RGB", "L", "RGBA", "CMYK", "I;16", "F", "LAB", "YCbCr", "1", "P", "I"),
    "PPM": ("RGB", "L", "1", "I"),
}
_OTHERS = ("ICO", "TGA", "PCX", "SGI", "DDS", "JPEG2000", "EPS", "PDF", "IM", "SPIDER", "MSP")
_SIDES = (1, 1, 2, 3, 7, 16, 31, 64, 100, 257)
_COMPRESSIONS = (
    None,
    "tiff_lzw",
    "tiff_deflate",
    "packbits",
    "jpeg",
    "group4",
    "tiff_adobe_deflate",
)
_TEXTS = (
    b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", b"", b"\0", b"GIF89a",
    b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", b"\0\0\0\x1cftypavif\0\0\0\0",
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run", b"%PDF-1.4",
    b"P6 1e9 1 255 ",
    b"P5 0 0 255\n", b"P6\n3 -1\n255\n" + bytes(9), b"P3 2 1 65535 1 2 3 4 5 99999", b"P4 9 9\n",
    b"BM" + bytes(60), b"II*\0" + b"\xff" * 40, b"RIFF\x04\x00\x00\x00WEBPVP8 ", b"<?php",
)  # fmt: skip


# ---- pictures ------------------------------------------------------------------------------------


def _drawn(rng: random.Random, mode: str) -> Image.Image:
    width, height = rng.choice(_SIDES), rng.choice(_SIDES)
    if rng.random() < 0.05:
        width, height = rng.choice([(1, 5000), (6000, 2), (3000, 1)])
    seed = np.random.default_rng(rng.getrandbits(32))
    rgb = Image.fromarray(seed.integers(0, 256, (height, width, 3), np.uint8))
    if mode == "I;16":
        return rgb.convert("L").convert("I;16").point(lambda value: value * 257)
    if mode == "LAB":
        return Image.frombytes("LAB", rgb.size, rgb.tobytes())
    return rgb.convert("L").convert(mode) if mode in ("I", "F") else rgb.convert(mode)


def _exif(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return b"Exif\0\0" + rng.randbytes(rng.randrange(60))
    exif = Image.Exif()
    exif[0x0112] = rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 255, 65535])
    exif[0x010E] = "x" * rng.choice([0, 9, 40_000])
    return exif.tobytes()


def encoded(rng: random.Random) -> bytes:
    """A valid picture of some format, of which Pillow may also refuse to write some."""
    name = rng.choice(FORMATS)
    picture = _drawn(rng, rng.choice(MODES[name]))
    options: dict[str, Any] = {}
    if name in ("JPEG", "PNG", "WEBP") and rng.random() < 0.5:
        options["exif"] = _exif(rng)
    if rng.random() < 0.2:
        options["icc_profile"] = rng.randbytes(rng.choice([3, 200, 3000]))
    if name == "JPEG":
        options |= {"progressive": rng.random() < 0.5, "subsampling": rng.randrange(3)}
    if name in ("PNG", "GIF") and picture.mode in ("P", "L", "1") and rng.random() < 0.5:
        options["transparency"] = rng.randrange(256)
        if name == "PNG" and picture.mode == "P":
            options["transparency"] = rng.choice([rng.randbytes(200), 7])
    if name == "TIFF":
        options["compression"] = rng.choice(_COMPRESSIONS)
        if rng.random() < 0.4:
            options["tiffinfo"] = {0x0112: rng.choice([1, 3, 6, 8, 99])}
    if name in ("PNG", "GIF", "WEBP", "TIFF") and rng.random() < 0.25:
        more = [_drawn(rng, picture.mode) if name == "TIFF" else picture.transpose(0)]
        options |= {"save_all": True, "append_images": more}
    file = io.BytesIO()
    picture.save(file, name, **options)
    return file.getvalue()


def _other(rng: random.Random) -> bytes:
    file = io.BytesIO()
    mode = rng.choice(["RGB", "L", "1", "F"])
    _drawn(rng, mode).save(file, rng.choice(_OTHERS))
    return file.getvalue()


def _text(rng: random.Random) -> bytes:
    return rng.choice(_TEXTS) + rng.choice([b"", rng.randbytes(50)])


def _damaged(rng: random.Random) -> bytes:
    raw = bytearray(encoded(rng))
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(raw) + 1) if rng.random() < 0.6 else rng.randrange(min(64, len(raw)))
        kind = rng.randrange(6)
        if kind == 0:
            del raw[at:]
        elif kind == 1 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            raw[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
        elif kind == 3:
            raw[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", bytes(4)])
        elif kind == 4:
            raw[at:at] = raw[: rng.randrange(len(raw) + 1)]
        elif len(raw) > at:
            raw[at : at + rng.randrange(200)] = b""
        if not raw:
            return bytes(raw)
    return bytes(raw)


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(width: int, height: int, *more: bytes) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = _chunk(b"IDAT", zlib.compress(bytes(min((1 + (width + 7) // 8) * height, 8 << 20))))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + rows + _chunk(b"IEND", b"")


@lru_cache
def _zeros() -> bytes:
    return zlib.compress(bytes(300 << 20), 9)


def _bomb(rng: random.Random) -> bytes:
    """Small files of enormous pictures, texts or tables."""
    kind = rng.randrange(7)
    if kind == 0:
        side = rng.choice([7_071, 7_072, 20_000, 2**31 - 1, 2**32 - 1, 0])
        return _png(side, rng.choice([side, 1, 7_071]))
    if kind == 1:
        name = rng.choice([b"zTXt", b"iCCP"])
        return _png(8, 8, _chunk(name, b"a\0\0" + _zeros()))
    if kind == 2:
        width, height = rng.choice([(65535, 65535), (1, 1), (0, 0)])
        screen = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6)
        frame = b",\0\0\0\0" + struct.pack("<HH", width, height)
        return screen + frame + b"\0\x02\x02L\x01\0;"
    if kind == 3:
        tags = [(256, 60_000), (257, 60_000), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1),
                (278, 60_000), (279, rng.choice([9, 2**32 - 1]))]  # fmt: skip
        entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + entries + bytes(4)
    if kind == 4:
        count = rng.choice([2**31, 2**32 - 1, 10**7])
        return b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 256, 4, count, 8) + bytes(4)
    if kind == 5:
        return b"P6 %d %d 255\n" % rng.choice([(50_000, 50_000), (7_000, 7_000), (10**9, 1)])
    width = rng.choice([100, 40_000])
    return b"BM" + struct.pack(
        "<IHHIIiiHHIIiiII", 0, 0, 0, 54, 40, width, -(2**31), 1, 24, 0, 0, 0, 0, 0, 0
    )


def picture(rng: random.Random) -> bytes:
    """A picture of some kind."""
    kinds: tuple[Callable[[random.Random], bytes], ...] = (encoded, _damaged, _other, _text, _bomb)
    kind = rng.choices(kinds, (10, 10, 2, 3, 3))[0]
    while True:
        try:
            return kind(rng)
        except Exception:  # Pillow does not write it
            continue


# ---- references ----------------------------------------------------------------------------------


def _opened(content: bytes) -> Image.Image:
    """What a program may have in a row: an image of Pillow, perhaps not loaded yet."""
    return Image.open(io.BytesIO(content))


def referred(rng: random.Random, content: bytes, folder: Path) -> tuple[Any, bool]:
    """A value that refers to a picture, and whether it does so correctly."""
    kind = rng.randrange(14)
    coded = base64.b64encode(content).decode()
    if kind < 5:
        names = [
            "a.png",
            "a.jpg",
            "a.txt",
            "a",
            "ü 漢.gif",
            "a\nb.png",
            "\x1b[2J",
            "%41.png",
            "a,b",
        ]
        name: str = os.fsdecode(b"\xff\xfe.png") if rng.random() < 0.1 else rng.choice(names)
        (folder / name).write_bytes(content)
        if kind == 4:
            link = folder / "link.png"
            link.symlink_to(name)
            name = link.name
        return rng.choice([name, {"path": name}, {"url": name}, str(folder / name)]), True
    if kind == 5:
        kinds = [
            "image/png;base64,",
            "IMAGE/JPEG;charset=x;BASE64,",
            ";base64,",
            "text/plain;base64,",
        ]
        return f"data:{rng.choice(kinds)}{coded}", True
    if kind == 6:
        return {"base64": "\n".join(coded[i : i + 76] for i in range(0, len(coded), 76))}, True
    if kind == 7:
        return rng.choice([content, bytearray(content), {"bytes": content, "path": None}]), True
    if kind == 8:
        return {"image_url": {"url": f"data:image/png;base64,{coded}"}}, True
    if kind == 9:
        return "data:image/png," + "".join(f"%{byte:02x}" for byte in content[:100_000]), (
            len(content) <= 100_000
        )
    return _wrong(rng, content, folder), False


def _wrong(rng: random.Random, content: bytes, folder: Path) -> Any:
    """A reference that is no picture."""
    deep: Any = content
    for _ in range(rng.choice([9, 100_000])):
        deep = {"image": deep}
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    with (folder / "large").open("wb") as file:
        file.truncate(IMAGE_BYTES + 1)
    coded = base64.b64encode(content).decode()
    return rng.choice(
        ["dangling", "loop", "fifo", "large", "/dev/zero", "/dev/full", ".", "", "a" * 5000, "a\0b",
         "http://example.invalid/a.png", "HTTPS://x", "ftp://x/a.png", "file://", "file:///nowhere",
         "data:", "data:,", "data:image/png;base64", "data:image/png;base64,@@", "\ud800.png", 7,
         None, [], [content], {}, {"path": ""}, {"bytes": "é"}, {"base64": b"\xff"}, {"url": 3},
         {"type": "image"}, True, 1.5, coded, deep, {"base64": coded + "="}, object(), "~nobody/x",
         "~no such user/x"]
    )  # fmt: skip


# ---- outcomes ------------------------------------------------------------------------------------


def by_pillow(content: bytes) -> npt.NDArray[np.uint8] | None:
    """The pixels as transformers reads them; None if Pillow refuses, or there are too many."""
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
    if len(content) > IMAGE_BYTES:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > IMAGE_PIXELS:
                return None
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(image.convert("RGB"))
        except Exception:
            return None


@lru_cache
def _files(family: str) -> ImageFiles:
    folder = folder_of(family, Path(tempfile.mkdtemp()))
    config = json.loads((folder / "config.json").read_text())
    return ImageFiles(folder, config, Tokenizer.from_folder(folder).token)


def _processed(source: ImageSource, rgb: npt.NDArray[np.uint8], family: str) -> None:
    tokens = _files(family).tokens
    assert tokens.count(source) > 0
    if rgb.shape[0] * rgb.shape[1] <= _PROCESSED:
        processed = tokens.processor(rgb)
        assert all(np.isfinite(crop).all() for crop in processed.crops)


def _fault(rng: random.Random, value: Any, expected: Any, folder: Path) -> tuple[str, str]:
    """The outcome, and what is wrong with it."""
    try:
        source = image_source(value, folder, "image 1").measured()
        rgb = source.decoded()
    except DataError as err:
        text = str(err)
        if (
            "\n" in text
            or len(text) > 600
            or not text.startswith(("image 1", "cannot read image 1"))
        ):
            return "refused", f"the error is not a sentence: {text[:700]!r}"
        return "refused", f"Pillow reads it: {text}" if expected is not None else ""
    if expected is None:
        return "decoded", "Pillow refuses it"
    if rgb.shape != expected.shape or not np.array_equal(rgb, expected):
        return "decoded", f"other pixels: {rgb.shape}, Pillow's {expected.shape}"
    if (source.height, source.width) != rgb.shape[:2]:
        return "decoded", f"measured as {source.height} x {source.width}, decoded as {rgb.shape}"
    try:
        _processed(source, rgb, rng.choice(list(FAMILIES)))
    except DataError as err:
        return "refused by the processor", "" if "\n" not in str(err) else str(err)
    return "decoded", ""


def _shown(value: Any) -> str:
    try:
        return repr(value)[:60]
    except RecursionError:
        return type(value).__name__


def run(count: int, seed: int, tally: Tally) -> None:
    """Runs trials."""
    begin = peak_bytes()
    for number in range(tally.first, tally.first + count):
        if tally.over:
            break
        rng = random.Random(f"{seed} {number}")
        content = picture(rng)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            value, is_right = referred(rng, content, folder)
            expected = by_pillow(content) if is_right else None
            began = time.monotonic()
            try:
                outcome, fault = _fault(rng, value, expected, folder)
            except Exception as err:
                outcome, fault = "raised", f"{type(err).__name__}: {err}"[:300]
            seconds = time.monotonic() - began
            if not fault and seconds > SECONDS:
                fault = f"it took {seconds:.0f} s"
            if not fault and peak_bytes() - begin > GROWTH:
                fault = f"this process grew to {peak_bytes() >> 20} MiB"
                begin = peak_bytes()
        if fault:
            tally.fail(fault, f"--seed {seed} --first {number} --count 1 ({_shown(value)})")
        else:
            tally.add(outcome)


if __name__ == "__main__":
    campaign("pictures", run, 2000)

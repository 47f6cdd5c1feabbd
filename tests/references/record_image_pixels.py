"""Records the pixels that transformers' image processors make, and torch's resizing.

usage: python tests/references/record_image_pixels.py    with torch, torchvision, transformers

Writes image_pixels.npz: of families whose processors make rows of patches, projections of those of
each crop of a few images; and small images of bytes that torch resized with antialiasing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from support.image_models import RESIZED, SIZES, bytes_of, folder_of, rgb_of  # noqa: E402

from references.projections import projections  # noqa: E402

FAMILIES = {"gemma4": "pil", "lfm2_vl": "torchvision"}


def crops(family):
    """(patches, ·) of each crop of each image."""
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(family, Path(place))
        processor = AutoImageProcessor.from_pretrained(folder, backend=FAMILIES[family])
    for size in (size for sizes in SIZES for size in sizes):
        made = processor([Image.fromarray(rgb_of(*size))], return_tensors="np")
        if family == "gemma4":
            counts = [int((made["image_position_ids"][0][:, 0] >= 0).sum())]
        else:
            counts = made["pixel_attention_mask"].sum(axis=1).tolist()
        yield [rows[:count] for rows, count in zip(made["pixel_values"], counts, strict=True)]


def resized(before, after, mode):
    pixels = torch.from_numpy(bytes_of(*before)).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(pixels, after, mode=mode, antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def main():
    made = {name: resized(*how) for name, how in RESIZED.items()}
    for family in FAMILIES:
        for i, own in enumerate(crops(family)):
            made[f"{family}/{i}"] = np.stack([projections("pixels", crop) for crop in own])
    np.savez_compressed(HERE / "image_pixels.npz", **made)
    print({name: array.shape for name, array in made.items()})


if __name__ == "__main__":
    main()

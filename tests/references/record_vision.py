"""Records the features that transformers' vision towers and connectors make of a few images.

usage: python tests/references/record_vision.py [CASE ...]

Needs torch and transformers; tests/references/README has the versions. Writes vision.npz: of each
case (``vision_cases.py``) config.json, the shapes of the tower's weights, which follow from their
names, and the features of its images, computed in float64.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from references.seeded import norm_offset, weights  # noqa: E402
from references.vision_cases import CASES, TILED, crops  # noqa: E402

TOWERS = ("vision", "visual", "projector", "connector", "newline")


def base_model(model_type, changes):
    """The model with seeded weights of its tower, its config.json and their shapes."""
    config = AutoConfig.for_model(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = json.loads(Path(folder, "config.json").read_text())
        file = Path(folder, "model.safetensors")
        tensors = load_file(file)
        shapes = {
            name: list(tensor.shape)
            for name, tensor in tensors.items()
            if any(part in name for part in TOWERS) and ".head." not in name
        }
        made = weights(shapes, norm_offset(model_type))
        tensors |= {name: torch.from_numpy(array) for name, array in made.items()}
        save_file(tensors, file, {"format": "pt"})
        model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval().double(), saved, shapes


def flat_patches(pixels, config):
    """Qwen's patches, merged ones next to each other, with all frames alike."""
    side, merge = config.patch_size, config.spatial_merge_size
    channels, height, width = pixels.shape
    rows, columns = height // side, width // side
    parts = pixels.reshape(channels, rows // merge, merge, side, columns // merge, merge, side)
    parts = parts.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, channels, 1, side, side)
    parts = np.repeat(parts, config.temporal_patch_size, axis=2)
    return torch.from_numpy(parts.reshape(rows * columns, -1)).double(), [1, rows, columns]


def features(model, config, images, tiles):
    """The features of each image's crops."""
    kind, tower, made = config.model_type, config.vision_config, []
    for i, own in enumerate(images):
        pixels, get = torch.from_numpy(np.stack(own)).double(), model.model.get_image_features
        if kind in ("idefics3", "smolvlm"):
            made.append(get(pixels[None]).pooler_output[0])
        elif kind == "lfm2_vl":
            side = tower.patch_size
            rows, columns = own[0].shape[1] // side, own[0].shape[2] // side
            parts = own[0].reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
            flat = torch.from_numpy(parts.reshape(1, rows * columns, -1)).double()
            mask = torch.ones(1, rows * columns, dtype=torch.long)
            made.append(get(flat, torch.tensor([[rows, columns]]), mask).pooler_output[0])
        elif kind == "gemma4":
            side = tower.patch_size
            rows, columns = own[0].shape[1] // side, own[0].shape[2] // side
            parts = own[0].reshape(3, rows, side, columns, side).transpose(1, 3, 2, 4, 0)
            flat = torch.from_numpy(parts.reshape(1, rows * columns, -1)).double()
            places = np.indices((rows, columns))[::-1].reshape(2, -1).T
            made.append(get(flat, torch.from_numpy(places.copy())[None]).pooler_output[0])
        elif kind.startswith("qwen"):
            flat, grid = flat_patches(own[0], tower)
            out = get(flat, torch.tensor([grid]))
            stack = (
                [d if isinstance(d, torch.Tensor) else d[0] for d in out.deepstack_features]
                if (kind == "qwen3_vl")
                else []
            )
            made.append(torch.cat([out.pooler_output[0], *stack], dim=-1))
        elif kind == "mistral3":
            sizes, layer = [own[0].shape[1:]], config.vision_feature_layer
            out = get(pixels, image_sizes=sizes, vision_feature_layer=layer)
            made.append(out.pooler_output[0])
        else:
            options = {}
            if kind != "gemma3":
                options = {
                    "vision_feature_layer": config.vision_feature_layer,
                    "vision_feature_select_strategy": config.vision_feature_select_strategy,
                }
            if kind == "llava_next":  # the whole image comes first there
                pixels = torch.cat([pixels[-1:], pixels[:-1]])[None]
                options["image_sizes"] = torch.tensor([tiles[i][0]])
            made.append(get(pixels, **options).pooler_output[0])
    return [each.numpy().astype(np.float32) for each in made]


def main():
    torch.set_num_threads(1)
    cases, path = sys.argv[1:] or CASES, HERE / "vision.npz"
    made = dict(np.load(path)) if sys.argv[1:] else {}
    for case in cases:
        model_type, changes, _ = CASES[case]
        model, config, shapes = base_model(model_type, changes)
        with torch.no_grad():
            found = features(model, model.config, crops(case), TILED)
        made |= {f"{case}/config": json.dumps(config), f"{case}/shapes": json.dumps(shapes)}
        made |= {f"{case}/{i}": each for i, each in enumerate(found)}
        print(case, [each.shape for each in found], flush=True)
    np.savez_compressed(path, **made)


if __name__ == "__main__":
    main()

"""Writes a model folder of random weights in a shape: 4-bit as bitsandbytes writes it, or bfloat16.

Weights in 4 bits are made as such, so that 8B takes seconds and no memory.

Usage: python benchmarks/random_model.py llama-3.1-8b /tmp/8b [--form nf4] [--layers 32]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy.typing as npt

from qlora_wgpu.bench.workload import SHAPES, RandomFolder, config_of
from qlora_wgpu.bfloat16 import to_bfloat16
from qlora_wgpu.checkpoint.quantized.bitsandbytes import nf4_entries, nf4_parts, quantization_config
from qlora_wgpu.checkpoint.safetensors_file import Entry, write_stream
from qlora_wgpu.config import QuantConfig
from qlora_wgpu.families.family import find_family


def write_random_model(folder: Path, config: dict[str, Any], quant: QuantConfig | None) -> None:
    """Writes it.

    Args:
        folder: Where; it is made.
        config: The config.json.
        quant: How linear layers are stored; None for bfloat16.
    """
    random = RandomFolder(config, quant=quant)
    linears = {f"{spec.name}.weight" for spec in find_family(config).read(config).every_linear}
    entries: dict[str, Entry] = {}
    owners: dict[str, str] = {}
    for name in random.names():
        shape = random[name].shape
        if quant is not None and name in linears:
            parts = nf4_entries(name, shape, quant.blocksize, quant.double_quant)
        else:
            parts = {name: Entry("BF16", shape)}
        entries |= parts
        owners |= dict.fromkeys(parts, name)
    made: dict[str, dict[str, npt.NDArray[Any]]] = {}

    def data(part: str) -> npt.NDArray[Any]:
        name = owners[part]
        if name not in made:
            made.clear()
            weight = random[name].quantized()
            if weight is None:
                made[name] = {name: to_bfloat16(random[name].read())}
            else:
                made[name] = nf4_parts(name, weight, "bfloat16")
        return made[name][part]

    folder.mkdir(parents=True, exist_ok=True)
    if quant is not None:
        # Named, or transformers takes a tied head for a quantized layer, too.
        skipped = quantization_config(quant.double_quant, ["lm_head"])
        config = {**config, "quantization_config": skipped}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_stream(folder / "model.safetensors", entries, data)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=["nf4", "bfloat16"], default="nf4")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--vocabulary", type=int, help="instead of the shape's")
    options = parser.parse_args()
    config = config_of(options.shape)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    if options.vocabulary:
        config["vocab_size"] = options.vocabulary
    write_random_model(options.folder, config, QuantConfig() if options.form == "nf4" else None)


if __name__ == "__main__":
    main()

"""Logits of llama.cpp, in a process of their own.

usage: python -m campaigns.adapter_walk_llama LIBRARY MODEL ADAPTER IDS OUT
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from references.llama_cpp import LlamaCpp


def main(library, path, adapter, ids, out):
    model = LlamaCpp(library).open(path)
    np.save(out, np.stack([model.logits(row, adapter or None) for row in json.loads(ids)]))
    model.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

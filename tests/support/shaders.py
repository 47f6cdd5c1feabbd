"""Commands under test have caches of their own, but share compiled shaders with all others."""

import os
from pathlib import Path

from qlora_wgpu.gpu.adapters import widen_software_vectors

FEW_ROWS = 8
"""Of a product's tile on software GPUs; more change no bit, but take longer to compile."""


def keep_compiled_shaders():
    """Tells commands where Mesa keeps this user's shaders, wherever their own cache is."""
    widen_software_vectors(os.environ)
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("MESA_SHADER_CACHE_DIR", caches)

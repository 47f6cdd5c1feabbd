"""Kernels whose cut follows from the width of a software GPU's vectors, at every width."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.parametrize("bits", [128, 256, 512])
def test_vectors_of_other_processors_compute_rightly(device, bits):
    environ = {**os.environ, "LP_NATIVE_VECTOR_WIDTH": str(bits), "PYTHONPATH": str(ROOT)}
    environ.pop("MESA_SHADER_CACHE_DIR", None)  # the width's own is taken
    script = Path(__file__).with_name("checked_vectors.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(result["good"] for result in told["results"].values()), told
    if "llvmpipe" in device.name and device.profile.textures:
        assert told["lanes"] == bits // 32

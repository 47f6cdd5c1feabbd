"""Where recordings of other trainers are, which are too large for the repository.

They lie in shared/data beside the checkout; QLORA_WGPU_SHARED_DATA names another folder, which then
must be there.
"""

import os
from pathlib import Path

import pytest

_NAMED = os.environ.get("QLORA_WGPU_SHARED_DATA")
RECORDED = Path(_NAMED) if _NAMED else Path(__file__).parents[3] / "shared" / "data"

if _NAMED and not (RECORDED / "oracles").is_dir():
    raise FileNotFoundError(f"QLORA_WGPU_SHARED_DATA is {_NAMED}, where no recordings are")

needs_recordings = pytest.mark.skipif(
    not (RECORDED / "oracles").is_dir(),
    reason="the recordings are not beside this checkout (QLORA_WGPU_SHARED_DATA names them)",
)

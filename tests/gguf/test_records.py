"""Every kind of model as a GGUF file, and read back: what was recorded of them, to the byte."""

from __future__ import annotations

import json

import pytest
from support.gguf_models import CHANGES
from support.gguf_records import RECORDS, record

KNOWN = json.loads(RECORDS.read_text())
# One of each way in which keys and tensors are laid out
CHOSEN = ("mixtral", "granitemoeshared", "gemma2", "gemma4_text experts", "gpt_neox", "gpt_oss",
          "lfm2_moe", "qwen3_5_text", "qwen3_next", "apertus", "glm4_moe_lite")  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", [c if c in CHOSEN else pytest.param(c, marks=pytest.mark.full) for c in CHANGES]
)
def test_files_are_what_they_were(tmp_path, case) -> None:
    assert record(case, tmp_path) == KNOWN[case]

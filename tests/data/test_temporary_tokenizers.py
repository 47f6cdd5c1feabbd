"""Folders that are kept for as long as the process runs."""

import subprocess
import sys

import pytest
from e2e.tiny import write_tokenizer


@pytest.mark.slow
def test_a_folder_with_new_tokens_goes_with_the_process_without_a_warning(tmp_path):
    write_tokenizer(tmp_path)
    code = (
        "from pathlib import Path\n"
        "from qlora_wgpu.data.tokenizer import extended_tokenizer\n"
        f"print(extended_tokenizer(Path({str(tmp_path)!r}), ['ab'], []).folder)"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert not done.stderr and done.returncode == 0
    assert done.stdout and not (tmp_path / done.stdout.strip()).exists()

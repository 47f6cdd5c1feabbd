"""What is written once and compiled many times over has no branches: compilers differ in what
they make of them. SwiftShader's, Chromium's where there is no GPU, took 9 GB for 32 in a loop."""

import re

from qlora_wgpu.gpu.wgsl import shader_folder


def test_masks_of_dropout_are_drawn_without_a_branch():
    text = (shader_folder() / "common/dropout.wgsl").read_text(encoding="utf-8")
    code = re.sub(r"//.*", "", text)
    assert "fn dropout_mask(" in code
    assert re.findall(r"\b(?:if|for|while|loop|switch)\b", code) == []

"""Every family traced without a device: each kernel is given what it can read."""

from dataclasses import replace

import pytest
from references.sized import head_dims, traced_configs, with_head_dim

from qlora_wgpu.config import LoraConfig, QuantConfig
from qlora_wgpu.gpu.kernel_config import CPU_PROFILE, GPU_PROFILE, cpu_profile, gpu_profile
from qlora_wgpu.gpu.matrix import MatrixShape
from qlora_wgpu.model.memory_plan import plan_training_memory

CONFIGS = traced_configs()
PROFILES = {
    "buffers": CPU_PROFILE,
    "textures": cpu_profile(8),
    "textures of 4": cpu_profile(4),
    "registers": replace(GPU_PROFILE, gemm_kind="register", attention_kind="register"),
    "workgroup memory": GPU_PROFILE,
    "matrix units": gpu_profile(MatrixShape(8, 8, 8, 32)),
}


@pytest.mark.slow
@pytest.mark.cover("values", family=list(CONFIGS)[1::2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_traced(family, profile, dtype):
    for head_dim in head_dims(family):
        config = with_head_dim(CONFIGS[family], head_dim)
        for scheme, checkpointing, dora in (("nf4", True, False), ("none", False, True)):
            lora = LoraConfig(r=5, lora_dropout=0.1, use_dora=dora)
            memory = plan_training_memory(
                config,
                lora,
                QuantConfig(scheme=scheme),
                dtype,
                batch_size=2,
                seq=24,
                gradient_checkpointing=checkpointing,
                profile=PROFILES[profile],
            )
            assert memory["activations"] > 0

"""The names and signatures that users build on."""

import inspect

import qlora_wgpu
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, Trainer


def test_names() -> None:
    assert sorted(qlora_wgpu.__all__) == [
        "Config",
        "LoraConfig",
        "QLoRAError",
        "QLoRAModel",
        "QuantConfig",
        "TrainResult",
        "Trainer",
        "__version__",
        "load_config",
    ]
    for name in qlora_wgpu.__all__:
        assert hasattr(qlora_wgpu, name)


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures() -> None:
    loading = parameters(QLoRAModel.from_pretrained)
    assert loading[:5] == ["path", "lora", "quant", "compute_dtype", "device"]
    arguments = ["self", "input_ids", "labels", "attention_mask"]
    assert parameters(QLoRAModel.loss_and_grads) == arguments
    assert parameters(QLoRAModel.logits) == ["self", "input_ids", "attention_mask"]
    assert parameters(QLoRAModel.adapter_state_dict) == ["self"]
    assert parameters(QLoRAModel.base_state_dict) == ["self"]
    assert len(parameters(QLoRAModel.load_adapter)) == 2
    assert parameters(QLoRAModel.save_adapter) == ["self", "path"]
    assert parameters(Trainer)[:2] == ["model", "config"]
    assert parameters(Trainer.train) == ["self", "train_dataset", "eval_dataset"]


def test_public_configs() -> None:
    assert LoraConfig(r=8, lora_alpha=16).scaling == 2.0
    quant = QuantConfig(scheme="nf4", blocksize=64, double_quant=True)
    assert (quant.scheme, quant.blocksize, quant.double_quant) == ("nf4", 64, True)

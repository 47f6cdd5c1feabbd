"""The names and signatures that users build on."""

import inspect
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

import qlora_wgpu
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, Trainer, load_config


def test_names() -> None:
    assert sorted(qlora_wgpu.__all__) == [
        "Config",
        "Dataset",
        "LoraConfig",
        "QLoRAError",
        "QLoRAModel",
        "QuantConfig",
        "RunHistory",
        "Step",
        "Tokenizer",
        "TrainResult",
        "Trainer",
        "TrainerCallback",
        "__version__",
        "estimate",
        "evaluate",
        "export",
        "generate",
        "init",
        "load_config",
        "load_dataset",
        "merge",
        "open_adapter",
        "push",
        "quantize",
        "read_log",
        "register_family",
        "train",
    ]
    for name in qlora_wgpu.__all__:
        assert hasattr(qlora_wgpu, name)
    assert dir(qlora_wgpu) == sorted(qlora_wgpu.__all__)
    assert callable(qlora_wgpu.export)  # no room has a function's name


NEEDED = inspect.Parameter.empty
SIGNATURES = {
    QLoRAModel.from_pretrained: {
        "path": NEEDED,
        "lora": None,
        "quant": None,
        "compute_dtype": "bfloat16",
        "device": None,
    },
    QLoRAModel.loss_and_grads: {
        "self": NEEDED,
        "input_ids": NEEDED,
        "labels": NEEDED,
        "attention_mask": None,
    },
    QLoRAModel.logits: {"self": NEEDED, "input_ids": NEEDED, "attention_mask": None},
    QLoRAModel.adapter_state_dict: {"self": NEEDED},
    QLoRAModel.base_state_dict: {"self": NEEDED},
    QLoRAModel.load_adapter: {"self": NEEDED, "adapter": NEEDED, "name": None},
    QLoRAModel.set_adapter: {"self": NEEDED, "name": NEEDED},
    QLoRAModel.delete_adapter: {"self": NEEDED, "name": NEEDED},
    QLoRAModel.save_adapter: {"self": NEEDED, "path": NEEDED},
    Trainer.train: {"self": NEEDED, "train_dataset": None, "eval_dataset": None},
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function) -> None:
    """What may be given by place; more may be added, but only by name and with a default."""
    parameters = inspect.signature(function).parameters.values()
    by_place = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert by_place == SIGNATURES[function]
    assert list(by_place) == list(SIGNATURES[function])
    assert all(p.default is not NEEDED for p in parameters if p.kind is p.KEYWORD_ONLY)
    kinds = {p.kind for p in parameters}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", [n for n in qlora_wgpu.__all__ if n != "__version__"])
def test_each_name_is_described_and_documented(name) -> None:
    value = getattr(qlora_wgpu, name)
    assert inspect.getdoc(value), name
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    assert re.search(rf"\b{name}\b", page), f"docs/python.md does not speak of {name}"
    if inspect.isclass(value):
        own = [m for n, m in vars(value).items() if inspect.isfunction(m) and n[0] != "_"]
        assert all(inspect.getdoc(method) for method in own), name


def test_trainer_and_load_config() -> None:
    assert list(inspect.signature(Trainer).parameters)[:2] == ["model", "config"]
    assert next(iter(inspect.signature(load_config).parameters)) == "path"


def test_public_configs() -> None:
    lora = LoraConfig(r=8, lora_alpha=16)
    assert lora.scaling == 2.0
    assert LoraConfig(r=4, lora_alpha=16, use_rslora=True).scaling == 8.0
    assert (lora.lora_dropout, lora.target_modules, lora.use_rslora) == (0.0, "all-linear", False)
    quant = QuantConfig(scheme="nf4", blocksize=64, double_quant=True)
    assert quant == QuantConfig()
    assert QuantConfig(scheme="none").scheme == "none"
    for wrong in ("int8", "NF4", ""):
        with pytest.raises((qlora_wgpu.QLoRAError, ValidationError)):
            QuantConfig(scheme=wrong)


def test_defaults_are_those_of_the_readme(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("model: {path: somewhere}\n")
    config = load_config(tmp_path / "c.yaml")
    defaults = {
        "quant": {"scheme": "nf4", "blocksize": 64, "double_quant": True},
        "lora": {
            "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear",
            "use_rslora": False,
        },
        "data": {"max_seq_length": 1024},
        "train": {
            "num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 16, "gradient_checkpointing": True,
            "compute_dtype": "bfloat16", "seed": 0,
        },
        "optim": {
            "learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03,
            "weight_decay": 0.0, "max_grad_norm": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
        },
        "eval": {"eval_steps": 50},
        "log": {"logging_steps": 1},
        "output": {"dir": "runs/first", "save_steps": 50, "save_total_limit": 2},
        "device": {"gpu": "auto"},
    }  # fmt: skip
    for section, keys in defaults.items():
        values = getattr(config, section).model_dump()
        assert {key: values[key] for key in keys} == keys, section


def test_importing_asks_for_no_device() -> None:
    """So that --help and the data tools work where there is no driver."""
    import subprocess
    import sys

    code = "import sys, qlora_wgpu; print('wgpu' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_bare_checkout_tells_its_version():
    """Metadata of this package are there where it is installed alone."""
    asked = re.compile(r"""version\(["']qlora[-_]wgpu["']\)""")
    modules = list(Path(qlora_wgpu.__file__).parent.rglob("*.py"))
    assert [path.name for path in modules if asked.search(path.read_text(encoding="utf-8"))] == []

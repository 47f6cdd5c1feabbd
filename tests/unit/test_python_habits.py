"""What users bring along from other libraries: types, help, PEFT's names and default arguments."""

import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import qlora_wgpu
from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig, Trainer
from qlora_wgpu.config.section import summary
from qlora_wgpu.errors import ConfigError

RIGHT = """\
from collections.abc import Iterator

import qlora_wgpu
from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig, Step, TrainerCallback


class Stop(TrainerCallback):
    def on_step_end(self, step: Step) -> None:
        if step.loss is not None and step.loss < 1.0:
            step.stop("the loss is low enough")


lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
result = qlora_wgpu.train("run.yaml", callbacks=[Stop()], max_steps=10)
loss: float | None = result.eval_loss
model = QLoRAModel.from_pretrained("model", lora=lora, quant=QuantConfig(double_quant=False))
chat = [{"role": "user", "content": "Hi"}]
one: str = model.generate("Once", max_new_tokens=5)
answer: str = model.generate(chat)
several: list[str] = model.generate(["Once", "Twice"], batch_size=2)
ids: list[int] = model.generate([1, 2])
pieces: Iterator[str] = model.generate("Once", stream=True)
path = qlora_wgpu.merge("runs/first", check=False).path
size: int = qlora_wgpu.export("runs/first", type="q8_0").nbytes
"""
WRONG = {
    "LoraConfig(rank=8)": "rank",
    'LoraConfig(r="eight")': '"r"',
    'QuantConfig(scheme="int8")': "scheme",
    "Config(lora=LoraConfig())": "model",
    'qlora_wgpu.merge("runs/first", base="other")': "base",
    'qlora_wgpu.train("run.yaml", callbacks=[print])': "List item 0",
}


@pytest.mark.full
def test_a_users_script_is_checked_by_its_types(tmp_path):
    head = "import qlora_wgpu\nfrom qlora_wgpu import Config, LoraConfig, QuantConfig\n"
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(head + "\n".join(WRONG) + "\n")
    root = Path(qlora_wgpu.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-color",
            "--config-file=", "--ignore-missing-imports", "right.py", "wrong.py",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MYPYPATH": str(root)},
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for number, (line, word) in enumerate(WRONG.items(), start=3):
        assert any(e.startswith(f"wrong.py:{number}: ") and word in e for e in errors), line
    assert (root / "qlora_wgpu/py.typed").exists()


@pytest.mark.parametrize("kind", [Config, LoraConfig, QuantConfig])
def test_help_shows_each_setting_within_a_screen(kind):
    shown = pydoc.plain(pydoc.render_doc(kind))
    assert len(shown.splitlines()) <= 60
    text = " ".join(shown.replace("|", " ").split())
    for name, field in kind.model_fields.items():
        assert f" {name} (" in text, name
        description = field.description or summary(field.annotation)
        assert description.split(",")[0].split(":")[0][:40] in text, name
    assert "r (int, default 16): Rank of" in pydoc.render_doc(LoraConfig)


def test_tab_completion_has_the_public_names_alone():
    names = dir(QLoRAModel)
    assert len(names) < 30 and {"generate", "save_pretrained", "logits"} <= set(names)
    assert not {"accumulate", "read_flat", "programs", "write_stats"} & set(names)
    assert all(hasattr(QLoRAModel, name) for name in names if name != "device")
    assert len(dir(qlora_wgpu)) < 30


def test_peft_s_default_arguments_are_accepted():
    copied = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj"], lora_dropout=0.05, bias="none",
        task_type="CAUSAL_LM", inference_mode=False, fan_in_fan_out=False, modules_to_save=None,
        init_lora_weights=True, layers_pattern=None, loftq_config={},
    )  # fmt: skip
    plain = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], lora_dropout=0.05)
    assert copied == plain and "bias" not in copied.model_dump()
    in_section = {"model": {"path": "m"}, "lora": {"r": 8, "bias": "none"}}
    assert Config.model_validate(in_section).lora == LoraConfig(r=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraConfig(bias="all"), "bias in LoraConfig must be 'none', got 'all': no other"),
        (lambda: LoraConfig(task_type="SEQ_CLS"), "must be 'CAUSAL_LM', got 'SEQ_CLS'"),
        (lambda: LoraConfig(fan_in_fan_out=True), "must be false, got true"),
        (
            lambda: Config.model_validate({"model": {"path": "m"}, "lora": {"bias": "all"}}),
            "lora.bias in Config must be 'none', got 'all'",
        ),
        (lambda: LoraConfig(rank=8), "did you mean 'r'"),
        (lambda: LoraConfig(lora_droput=0.1), "did you mean 'lora_dropout'"),
        (lambda: QuantConfig(load_in_4bit=True), "did you mean 'scheme'"),
        (lambda: QuantConfig(bnb_4bit_use_double_quant=True), "did you mean 'double_quant'"),
        (
            lambda: qlora_wgpu.train({"model": {"path": "m"}}, learning_rat=1e-4),
            "did you mean 'optim.learning_rate'",
        ),
        (
            lambda: qlora_wgpu.train({"model": {"path": "m"}}, num_epochs=1),
            "did you mean 'train.num_train_epochs'",
        ),
        (lambda: Trainer(None, None, callbacks=[print]), "a list of TrainerCallback objects"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)

"""A model's memory goes with its last reference, or when it is closed."""

import gc
import weakref

import numpy as np
import pytest

import qlora_wgpu
from e2e.tiny import write_model
from qlora_wgpu import Config, LoraConfig, QLoRAModel, Trainer
from qlora_wgpu.errors import ConfigError, DeviceError
from qlora_wgpu.gpu.device import Device

pytestmark = pytest.mark.own_device  # whose own lifetime is what is looked at


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("lifetime") / "model")


@pytest.fixture
def without_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def use(model):
    ids = [[1, 2, 3, 4, 5]]
    model.loss_and_grads(ids, ids)
    model.logits(ids)
    model.summed_loss([(ids, ids, None)])
    model.generate("a", max_new_tokens=2)


def test_a_model_that_nobody_holds_is_gone(folder, without_collector):
    model = QLoRAModel.from_pretrained(folder, lora=LoraConfig(r=4, use_dora=True))
    use(model)
    device, raw = weakref.ref(model.device), weakref.ref(model.device.raw)
    del model
    assert device() is None and raw() is None


def test_a_device_of_several_models_counts_those_that_live(folder, without_collector):
    device = Device()
    for _ in range(2):
        model = QLoRAModel.from_pretrained(folder, device=device)
        use(model)
        assert device.memory.total > 0
        del model
        assert device.memory.total == 0


def test_a_trained_model_is_gone(folder, tmp_path, without_collector):
    model = QLoRAModel.from_pretrained(folder)
    config = Config(
        model={"path": str(folder)}, data={"max_seq_length": 32}, output={"dir": tmp_path / "run"},
        train={"max_steps": 2, "gradient_accumulation_steps": 1}, eval={"eval_steps": 1},
    )  # fmt: skip
    rows = [{"input_ids": list(range(4, 20))} for _ in range(3)]
    Trainer(model, config).train(rows, rows)
    raw = weakref.ref(model.device.raw)
    del model
    assert raw() is None


def test_a_closed_model_holds_nothing_and_says_so(folder, without_collector):
    with QLoRAModel.from_pretrained(folder) as model:
        use(model)
        raw = weakref.ref(model.device.raw)
        assert "r 16 on 14 layers" in repr(model) and "MiB on" in repr(model)
    assert raw() is None and repr(model) == "QLoRAModel(closed)"
    with pytest.raises(DeviceError, match="the model is closed: open it again"):
        model.loss_and_grads([[1, 2]], [[1, 2]])
    model.close()  # once more is no harm


@pytest.mark.quick
def test_an_attribute_that_is_not_there(folder):
    with QLoRAModel.from_pretrained(folder) as model, pytest.raises(AttributeError, match="'lora'"):
        _ = model.lora


def test_with_an_adapter_of_a_file(folder, tmp_path):
    with QLoRAModel.from_pretrained(folder, lora=LoraConfig(r=3, lora_alpha=7)) as model:
        values = {n: np.full_like(a, 0.01) for n, a in model.adapter_state_dict().items()}
        model.load_adapter(values)
        model.save_adapter(tmp_path / "adapter")
    with QLoRAModel.from_pretrained(folder, adapter=tmp_path / "adapter", device=0) as model:
        assert (model.adapter.config.r, model.adapter.config.lora_alpha) == (3, 7)
        opened = model.adapter_state_dict()
        assert all(np.array_equal(opened[name], values[name]) for name in values)
    with pytest.raises(ConfigError, match="lora and adapter are mutually exclusive"):
        QLoRAModel.from_pretrained(folder, lora=LoraConfig(), adapter=tmp_path / "adapter")


def test_generate_takes_text_messages_and_ids(folder):
    with QLoRAModel.from_pretrained(folder) as model:
        text = model.generate("what is", max_new_tokens=5)
        ids = model.generate(model.tokenizer.encode("what is"), max_new_tokens=5)
        assert isinstance(text, str) and text == model.tokenizer.decode(ids)
        reply = model.generate([{"role": "user", "content": "hi"}], max_new_tokens=5)
        assert isinstance(reply, str)
        sampled = {
            model.generate("what is", max_new_tokens=5, temperature=2.0, seed=s) for s in range(4)
        }
        assert len(sampled) > 1
        assert model.generate([5, 6], max_new_tokens=3, stop_ids=range(100)) == []
        with pytest.raises(ConfigError, match="a prompt must be a string, a list of token ids"):
            model.generate([1.5])
        with pytest.raises(qlora_wgpu.QLoRAError, match="the prompt is empty"):
            model.generate([])
        with pytest.raises(qlora_wgpu.QLoRAError, match="the model's maximum is 256"):
            model.generate([5] * 300)

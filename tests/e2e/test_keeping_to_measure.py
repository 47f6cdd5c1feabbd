"""``eval`` keeps weights dequantized as training does; texts by themselves keep none."""

import pytest

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import Config, LoraConfig, QLoRAModel, QuantConfig
from qlora_wgpu.errors import OutOfMemoryError
from qlora_wgpu.model import derived_weights, memory_plan
from qlora_wgpu.model.qlora_model import device_layout
from qlora_wgpu.runs import evaluation, placement
from qlora_wgpu.runs.opening import OpenedModel, load_adapted
from qlora_wgpu.runs.placement import fit
from qlora_wgpu.runs.workload import CombinedWorkload, GenerationWorkload, LossWorkload
from qlora_wgpu.training import Observer

KIND = "dequantized weights"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured")
    write_model(path / "model", hidden_size=128, intermediate_size=256, vocab_size=512)
    write_chats(path / "chats.jsonl", rows=6)
    return path


class Notes(Observer):
    def __init__(self):
        self.plans = []

    def planned(self, memory):
        self.plans.append(memory)


def settings(place, **device):
    return Config.model_validate({
        "model": {"path": str(place / "model")},
        "data": {"train": str(place / "chats.jsonl"), "eval": str(place / "chats.jsonl"),
                 "max_seq_length": 256, "cache": False, "chat_template": "chatml"},
        "output": {"dir": str(place / "out")}, "device": device,
    })  # fmt: skip


@pytest.fixture
def measured(place, monkeypatch):
    """Evaluates; loss, bytes that are kept, all bytes of the device, and what was planned."""

    def run(**device):
        models, notes = [], Notes()

        def load(*args):
            models.append(load_adapted(*args))
            return models[-1]

        monkeypatch.setattr(evaluation, "load_adapted", load)
        found = qlora_wgpu.evaluate(settings(place, **device), notes)
        (model,) = models
        return found.base, model.device.memory, notes.plans

    return run


def test_measuring_keeps_them_with_the_same_bits(measured):
    plain, without, _ = measured(keep_dequantized=False)
    kept, memory, _ = measured()
    assert kept == plain
    assert without.by_kind[KIND] == 0 < memory.by_kind[KIND]


def test_a_third_of_the_machine_is_for_them_and_for_what_texts_read(place, device, monkeypatch):
    source = OpenedModel.open(str(place / "model"))
    layout = device_layout(
        source.pretrained, LoraConfig(r=1, lora_alpha=1), QuantConfig(), "bfloat16", device
    )
    rows, texts = LossWorkload(2, 64), GenerationWorkload(64, 80)
    sizes, answer = [], True
    monkeypatch.setattr(placement, "has_room", lambda nbytes: sizes.append(nbytes) or answer)

    def kept(reading, asked="auto"):
        return fit(reading, layout, device, Observer(), asked).layout.offload.dequantized

    assert kept(rows) and kept(CombinedWorkload([rows, texts])) and not kept(texts)
    assert sizes[1] - sizes[0] > layout.packed_sizes.nbytes > 0 and len(sizes) == 2
    answer = False
    assert not kept(rows) and not kept(CombinedWorkload([texts, rows])) and not kept(rows, False)
    assert kept(rows, True) and not kept(texts, True) and len(sizes) == 4


def test_a_budget_has_them_where_they_fit(measured):
    _, memory, _ = measured()
    budget = 2 * memory.total
    found, memory, (planned,) = measured(memory=f"{budget}B")
    assert planned[KIND] == memory.by_kind[KIND] > 0
    assert sum(planned.values()) == pytest.approx(memory.peak, rel=0.02)
    least = sum(planned.values()) - planned[KIND] // 2
    same, memory, (planned,) = measured(memory=f"{least}B")
    assert planned[KIND] == memory.by_kind[KIND] == 0 and same == found
    with pytest.raises(OutOfMemoryError, match=r"does not fit: .* and measuring with them .* auto"):
        measured(memory=f"{least}B", keep_dequantized=True)


@pytest.mark.quick
def test_texts_by_themselves_keep_none(place):
    source = OpenedModel.open(str(place / "model"))
    with load_adapted(source, None, settings(place, keep_dequantized=True), Observer()) as model:
        assert model.device.memory.by_kind[KIND] == 0


@pytest.mark.quick
def test_python_counts_what_texts_read_beside(place, device, monkeypatch):
    def opened(**how):
        with QLoRAModel.from_pretrained(
            place / "model", quant=QuantConfig(), device=device, **how
        ) as model:
            return model.layout

    plain = opened(keep_dequantized=False)
    most = 3 * (plain.dequantized_bytes + plain.packed_sizes.nbytes)
    assert opened().offload.dequantized and plain.packed_sizes.fits
    for there in (most, most - 1):
        for module in (memory_plan, derived_weights):
            monkeypatch.setattr(module, "machine_bytes", lambda there=there: there)
        assert opened().offload.dequantized == (there == most)

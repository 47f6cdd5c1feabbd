"""Steps beside rivals', in turns: what fails is a row with the reason, and the rest goes on."""

import importlib.machinery
import json
import sys
import zipfile
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from bench.parts import BENCHMARKS
from support.processes import until


@pytest.fixture
def scripts(gpu, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import gpu_prepare
    import gpu_rivals
    import gpu_watch
    import participants
    import rival_tables
    import turns

    yield SimpleNamespace(
        rivals=gpu_rivals, watch=gpu_watch, participants=participants, tables=rival_tables,
        turns=turns, prepare=gpu_prepare, Rows=gpu.Rows, read_rows=gpu.read_rows,
    )  # fmt: skip
    for name in ("turns", "unsloth_turns"):
        sys.modules.pop(name, None)


def test_all_train_the_same_rows_and_packed_ones_know_their_samples(scripts):
    plain = scripts.rivals.work_of("2x16", 1, 0.0)
    rows = scripts.turns.rows_of(plain, 50)
    np.testing.assert_array_equal(rows.ids, scripts.turns.rows_of(plain, 50).ids)
    assert rows.lengths == [16, 16] and (rows.labels == -100).sum() == 2
    packed = scripts.rivals.work_of("2x16p", 1, 0.0)
    assert (packed.name, packed.rank, plain.rank) == ("2x16 packed", 16, 8)
    rows = scripts.turns.rows_of(packed, 50)
    assert rows.lengths == [4, 3, 5, 2, 2, 2, 4, 3, 5, 2]
    assert rows.positions[1].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert rows.samples[1, [0, 2, 15]].tolist() == [1, 2, 5]
    np.testing.assert_array_equal(rows.labels == -100, rows.positions == 0)


def test_steps_before_the_timed_ones_are_not_counted(scripts):
    losses = iter([7.0, 6.0, 5.0, 4.0])
    work = scripts.turns.Work(2, 8, 8, False, 2, 0.0)
    answer = scripts.turns.timed(lambda: next(losses), work)
    assert (answer["first_loss"], answer["loss"], len(answer["seconds"])) == (7.0, 4.0, 2)


RIVAL = f"""
import os, sys, time
sys.path.insert(0, {str(BENCHMARKS / "peers")!r})
from turns import serve
kind, begun = sys.argv[1:]
open(begun, 'a').write(kind + '\\n')
def turn(work):
    print('a library prints')
    if kind == 'late' and work.batch == 1: raise ValueError('too much')
    if kind == 'dying': os._exit(7)
    if kind == 'hanging' and work.batch == 1: time.sleep(600)
    return {{'tokens_per_second': 100.0 * work.batch, 'first_loss': 7.0}}
def load(asked):
    if kind == 'broken': raise RuntimeError('not installed')
    return {{'asked': asked}}, turn
serve(load)
"""


@pytest.mark.full
def test_whatever_a_rival_does_is_a_row_and_the_others_have_their_turns(scripts, tmp_path):
    kinds = ("ours", "broken", "late", "dying", "hanging")
    begun, path = tmp_path / "begun", tmp_path / "rows.jsonl"
    commands = {kind: [sys.executable, "-c", RIVAL, kind, str(begun)] for kind in kinds}
    works = [scripts.rivals.work_of(text, 1, 0.0) for text in ("1x8", "2x8")]
    for _ in range(2):  # the second time there is nothing left
        rows = scripts.Rows(path, minded=True)
        scripts.rivals.measured(rows, works, 2, commands, {"folder": "x"}, patience=5.0)
    found = scripts.tables.tables(scripts.read_rows(path))
    failed = dict(scripts.tables.failed(found))
    assert failed.pop("1x8, late") == "ValueError: too much"
    assert failed.pop("1x8, hanging").startswith("no answer within")
    for name, why in (("broken", "RuntimeError: not installed"),
                      ("dying", "its process ended with 7")):  # fmt: skip
        assert failed.pop(f"1x8, {name}").startswith(why)
        assert failed.pop(f"2x8, {name}").startswith(why)
    assert not failed  # the late one and the hanging one were started anew
    assert found["2x8"]["ours"]["rounds"] == found["2x8"]["late"]["rounds"] == 2
    starts = begun.read_text().split()
    assert [starts.count(kind) for kind in kinds] == [1, 2, 2, 2, 2]
    keys = [row["key"] for row in scripts.read_rows(path) if "about" not in row["key"]]
    assert keys[0] == "1x8, 1, ours" and keys[5] == "1x8, 2, broken"  # another one begins


def turn(work, number, name, rate, **more):
    return {"key": f"{work}, {number}, {name}", "tokens_per_second": rate, "fresh": number == 1,
            "first_loss": 9.0, **more}  # fmt: skip


ROWS = [
    {"key": "about, 8, ours"},
    *(turn("1x8", i + 1, "ours", r, own_mib=100.4) for i, r in enumerate((100.0, 200.0, 300.0))),
    *(turn("1x8", i + 1, "peft", r, driver_mib=300.0) for i, r in enumerate((200.0, 250.0, 100.0))),
    turn("1x8", 1, "unsloth", 50.0, first_loss=9.2),
    {"key": "1x8, 2, unsloth", "failed": "OutOfMemoryError: too much"},
    {"key": "1x8, 1, peft-graphs", "failed": "RuntimeError: no CUDA"},
]


def test_a_ratio_is_of_one_round_and_where_we_are_slower_is_told(scripts):
    found = scripts.tables.tables(ROWS)
    assert found["1x8"]["peft"]["ratio"] == {"median": 0.8, "min": 0.5, "max": 3.0}
    assert found["1x8"]["unsloth"]["ratio"]["median"] == 2.0
    text = "\n".join(scripts.tables.lines("rivals-S", found))
    assert "0.80 (0.50 to 3.00), WE ARE SLOWER, 300 MiB" in text
    assert "failed: RuntimeError: no CUDA" in text and "later failed: OutOfMemoryError" in text
    assert scripts.tables.short("S", found) == [
        "S 1x8: ours 200 tokens/s, / peft 0.80, / unsloth 2.00, / peft-graphs failed"
    ]
    assert scripts.tables.apart("S", found) == [
        "WRONG S 1x8: unsloth begins with 9.2000, ours 9.0000"
    ]


def test_rivals_and_new_tokens_are_in_the_summary(gpu, scripts, tmp_path):
    names = ("rivals-S-dawn", "others-S-texts-dawn", "generation-S")
    (tmp_path / "state.json").write_text(json.dumps({n: {"status": "done"} for n in names}))
    texts = {"key": "texts 8", "tokens_per_second": 30.0}
    for name, rows in {names[0]: ROWS, names[1]: [texts]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "generation-S.json").write_text(json.dumps({"8": {"tokens_per_second": 20.0}}))
    figures = gpu.summary.summary(tmp_path)
    short = gpu.written.in_short(figures).splitlines()
    assert "FAILED in rivals-S-dawn: 2, 1x8, unsloth: OutOfMemoryError: too much" in short
    assert any(line.startswith("rivals-S-dawn 1x8: ours 200 tokens/s") for line in short)
    told = "S, 8 at a time: ours dawn 30, transformers 20, ours / transformers 1.50"
    assert told in short and told in gpu.written.written(figures)


class Recorded:
    """A model of Unsloth's, and what it was asked for."""

    def __init__(self):
        self.calls = {}

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls[name] = options
            return (self, None) if name == "from_pretrained" else self

        return call


@pytest.fixture
def unsloth(scripts, monkeypatch):
    """The script with stubs: the package itself takes a GPU to import."""
    recorded = Recorded()

    def stub(name, **values):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    torch = stub("torch", bfloat16="bf16", cuda=SimpleNamespace(is_available=lambda: True))
    stub("torch_turns", TorchTurns=lambda *args: lambda work: {"device": args[1]})
    for name in ("unsloth", "unsloth.utils", "unsloth.utils.attention_dispatch"):
        stub(name, FastLanguageModel=recorded, select_attention_backend=lambda packed: "sdpa")
    import unsloth_turns

    monkeypatch.setattr(unsloth_turns, "version", lambda name: "1")
    monkeypatch.setattr(unsloth_turns, "write_tokenizer", lambda folder: None)
    for name in ("UNSLOTH_DISABLE_STATISTICS", "UNSLOTH_COMPILE_LOCATION"):
        monkeypatch.setenv(name, "")
    return SimpleNamespace(script=unsloth_turns, calls=recorded.calls, torch=torch)


def test_unsloth_trains_what_the_others_do(scripts, unsloth, tmp_path):
    asked = {"folder": str(tmp_path / "m"), "rank": 16, "longest": 64, "backend": "x"}
    _, turn = unsloth.script.loaded(asked)
    loaded, adapted = unsloth.calls["from_pretrained"], unsloth.calls["get_peft_model"]
    assert loaded["load_in_4bit"] and loaded["max_seq_length"] == 64
    assert (adapted["r"], adapted["lora_alpha"], adapted["lora_dropout"]) == (16, 32, 0.0)
    assert len(adapted["target_modules"]) == 7
    for options in (*(loaded, adapted), unsloth.calls["for_training"]):
        assert options["use_gradient_checkpointing"] is False
    packed = scripts.rivals.work_of("2x64p", 1, 0.0)
    assert "packed_seq_lengths" in turn(packed)["attention"]


def test_why_unsloth_is_not_measured(unsloth, monkeypatch):
    unsloth.torch.cuda.is_available = lambda: False
    with pytest.raises(RuntimeError, match="need a GPU"):
        unsloth.script.loaded({})
    monkeypatch.setattr(unsloth.script, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="not installed"):
        unsloth.script.loaded({})


def test_memory_is_what_the_driver_gave_the_process_that_has_its_turn(scripts, monkeypatch):
    looks = iter([100, 900, 300])
    nvml = ModuleType("pynvml")
    process = [SimpleNamespace(pid=5, usedGpuMemory=5000 << 20), None]

    def compute(card):
        process[1] = SimpleNamespace(pid=4, usedGpuMemory=next(looks, 300) << 20)
        return process

    vars(nvml).update(
        NVMLError=OSError, nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: 0,
        nvmlDeviceGetComputeRunningProcesses=compute,
        nvmlDeviceGetGraphicsRunningProcesses=lambda card: [],
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=2000 << 20),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(scripts.watch, "_PAUSE", 0.001)
    with scripts.watch.watch_process(4) as seen:
        until(lambda: seen.get("driver_mib", 0) >= 900)
    assert seen == {"driver_mib": 900.0, "card_mib": 2000.0}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # it is not installed
    with scripts.watch.watch_process(4) as seen:
        assert seen == {}


def test_a_wheel_is_thinned_and_tells_what_it_needs(scripts, tmp_path):
    wheel = tmp_path / "unsloth-1-py3-none-any.whl"
    asked = ["Name: unsloth", "Requires-Dist: trl!=0.19.0,<=1.15.0 ; python_version > '3'",
             "Requires-Dist: datasets<5 ; extra == 'huge'", "Requires-Dist: torch>2"]  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("unsloth/__init__.py", "x = 1")
        packed.writestr("studio/large.js", "y" * 1000)
        packed.writestr("unsloth-1.dist-info/METADATA", "\n".join(asked))
        packed.writestr("unsloth-1.dist-info/RECORD", "old")
    needs = scripts.prepare.requirements(wheel, ("trl", "datasets"))
    assert needs == ["trl!=0.19.0,<=1.15.0"]
    scripts.prepare.thin(wheel, lambda name: not name.startswith("studio/"))
    with zipfile.ZipFile(wheel) as packed:
        assert "studio/large.js" not in packed.namelist()
        record = packed.read("unsloth-1.dist-info/RECORD").decode().split()
    assert record[0].startswith("unsloth/__init__.py,sha256=") and len(record) == 3

"""A site of a tiny model: its manifest, plans and memory agree, and the page gets what it asks."""

import gzip
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from e2e.tiny import write_model

from qlora_wgpu.config import Config
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.gpu.cost_model import CostModel
from qlora_wgpu.gpu.limits import ALIGNMENT, buffer_bytes
from qlora_wgpu.graph.submission import parts_needed
from qlora_wgpu.model.steps import StepOptions
from qlora_wgpu.runs.web import write_page
from qlora_wgpu.training.optimizer import STEP_NUMBERS
from qlora_wgpu.web import SiteOptions, variant
from qlora_wgpu.web.site import _buckets, _training, check_model, page_folder, put_prompts
from qlora_wgpu.web.variant import FilledBuffers, Shaders, SiteFiles, plan_json, window_json

RANKS, LENGTHS, VENDORS = (2, 3), (48, 16), ((), ("apple", "intel"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model", num_hidden_layers=1)
    (folder / "rows.jsonl").write_text('{"prompt": "a b", "completion": "c"}\n')
    return folder


def settings(place, **sections):
    sections = {"data": {"train": str(place / "rows.jsonl"), "max_seq_length": 32}} | sections
    model = {"path": str(place / "model")}
    lora = {"r": 2, "lora_alpha": 3, "use_dora": True}
    train = {"per_device_train_batch_size": 2}
    return Config.model_validate({"model": model, "lora": lora, "train": train, **sections})


@pytest.fixture(scope="module")
def site(place):
    told = []
    options = SiteOptions(ranks=RANKS, buckets=LENGTHS)
    made = write_page(settings(place), place / "site", options, with_data=True,
                      progress=told.append)  # fmt: skip
    assert any("embed" in name for name in told)
    return made


@pytest.fixture(scope="module")
def manifest(site):
    return json.loads((site.folder / "site.json").read_text())


def unpacked(site, name):
    return json.loads(gzip.decompress((site.folder / name).read_bytes()))


def plans_of(site, made):
    """The plans of a variant, each with the shortest rows that need it."""
    yield 0, made["update"]
    for length, name in made["steps"].items():
        for plan in unpacked(site, name).values():
            yield int(length), plan
    for programs in unpacked(site, made["text"])["programs"].values():
        yield 0, programs["hidden"]
        yield 0, programs["head"]
    for start in made["start"]:
        yield 0, start["program"]


def memory_of(site, made, length):
    """Bytes of the buffers, slots and parameters of plans that run one at a time."""
    buffers = {piece[0] for piece in made["filled"]} | {made["stats"][0], made["step_info"][0]}
    buffers |= {number for name in variant.VECTORS for number, _ in made["adapter"][name]}
    slots, parameters = [], 0
    for needed, plan in plans_of(site, made):
        if needed <= length:
            buffers |= {w[1] for launch in plan["launches"] for w in launch[2] if w[1] >= 0}
            parameters += max(sum(bool(launch[3]) for launch in plan["launches"]), 1)
            own = sorted(plan["slots"], reverse=True)
            rest = (slots[len(own) :], own[len(slots) :])
            slots = [*map(max, zip(slots, own, strict=False)), *rest[0], *rest[1]]
    sizes = sum(made["buffers"][number][2] for number in buffers)
    return sizes + sum(map(buffer_bytes, slots)) + ALIGNMENT * parameters, slots


@pytest.mark.slow
def test_the_manifest_names_each_variant_and_what_a_gpu_must_have(site, manifest):
    assert manifest["format"] == 1 and manifest["buckets"] == [16, 48]
    assert manifest["model"] == {"name": "model", "vocab_size": 83}
    cuts = [(each["rank"], tuple(each["vendors"])) for each in manifest["variants"]]
    assert cuts == [(rank, vendors) for vendors in VENDORS for rank in RANKS]
    most, windows = [], []
    for each in manifest["variants"]:
        assert set(each) == {"rank", "file", "memory", "vendors"}
        made = unpacked(site, each["file"])
        most += [*(nbytes for _, _, nbytes in made["buffers"]), *made["slots"]]
        windows += [len(x[2]) for _, plan in plans_of(site, made) for x in plan["launches"]]
    codes = [shader["code"] for shader in unpacked(site, manifest["shaders"])]
    assert manifest["needs"] == {
        "maxStorageBuffersPerShaderStage": max(windows),
        "maxComputeInvocationsPerWorkgroup": 256,
        "maxStorageBufferBindingSize": max(most),
        "maxBufferSize": max(most),
    }
    assert not any("//" in line or line != line.strip() for code in codes for line in code.split())


@pytest.mark.slow
def test_the_memory_of_each_rank_and_length_is_what_its_plans_take(site, manifest):
    assert site.folder.name == "site" and set(site.memory) == set(RANKS)
    for each in manifest["variants"]:
        made = unpacked(site, each["file"])
        for length in LENGTHS:
            told = memory_of(site, made, length)[0]
            assert each["memory"][str(length)] == told
            if not each["vendors"]:
                assert site.memory[each["rank"]][length] == told
        assert made["slots"] == memory_of(site, made, 48)[1]
    assert site.nbytes == sum(file["bytes"] for file in manifest["files"].values())
    own = sum(manifest["files"][name]["bytes"] for name in manifest["weights"])
    assert site.weight_bytes == own > 4000


def test_plans_stay_within_their_memory_and_name_their_shaders(site, manifest):
    shaders = unpacked(site, manifest["shaders"])
    assert len({shader["label"] for shader in shaders}) == len(shaders)
    for each in manifest["variants"]:
        made, used = unpacked(site, each["file"]), set()
        sizes = [nbytes for _, _, nbytes in made["buffers"]]
        for _, plan in plans_of(site, made):
            for shader, workgroups, windows, _, microseconds in plan["launches"]:
                used.add(shader)
                code = shaders[shader]["code"]
                bindings = re.findall(r"@binding\((\d+)\)\s*var<storage", code)
                assert sorted(w[0] for w in windows) == sorted(map(int, bindings))
                assert len(workgroups) == 3 and 10 <= microseconds < 500_000
                for _, memory, first, nbytes in windows:
                    room = sizes[memory] if memory >= 0 else plan["slots"][-1 - memory]
                    assert first % 256 == 0 and 0 < nbytes <= room - first
        assert made["shaders"] == sorted(used)
        few = [i for i in used if "FEW_REGISTERS=True" in shaders[i]["label"]]
        assert bool(few) == bool(each["vendors"])


def test_an_adapter_begins_as_training_begins_one(site, manifest):
    weights = [(site.folder / name).read_bytes() for name in manifest["weights"]]
    for each in manifest["variants"]:
        made, rank = unpacked(site, each["file"]), each["rank"]
        adapter = made["adapter"]
        assert adapter["config"]["base_model_name_or_path"] is None  # paths are private
        assert adapter["config"]["r"] == rank and adapter["config"]["lora_alpha"] == 1.5 * rank
        ((number, floats),) = adapter["parameters"]
        content = bytearray(made["buffers"][number][2])
        for buffer, first, file, begin, nbytes in made["filled"]:
            assert first + nbytes <= made["buffers"][buffer][2]
            if buffer == number:
                content[first : first + nbytes] = weights[file][begin : begin + nbytes]
        values = np.frombuffer(content, np.float32)[:floats]
        assert adapter["length"] <= floats
        begun = []
        for name, (offset, rows, columns) in adapter["tensors"].items():
            own = values[offset : offset + rows * columns]
            assert own.size == rows * columns
            if "magnitude" in name:  # which the page computes from the base
                begun.append(offset)
            else:
                assert own.any() == ("lora_A" in name), name
        places = [start["to"] for start in made["start"]]
        assert sorted(places) == [[number, 4 * offset] for offset in sorted(begun)]
        assert len(places) == 7
        for start in made["start"]:
            assert start["from"][0] < 0 or start["from"][2] <= made["buffers"][start["from"][0]][2]


def test_inputs_of_micro_batches_lie_apart(site, manifest):
    for each in manifest["variants"]:
        made = unpacked(site, each["file"])
        steps = {n: unpacked(site, name) for n, name in made["steps"].items()}
        assert list(steps) == ["48", "16"]  # the largest have made all buffers
        number, _, nbytes = made["step_info"]
        assert nbytes == 4 * STEP_NUMBERS and nbytes <= made["buffers"][number][2] < nbytes + 16
        for length, found in steps.items():
            for kind in ("train", "loss"):
                batch = found[kind]["batch"]
                assert batch["seq"] == int(length) and batch["batch"] == 2
                begins = [batch[name] for name in variant._FIELDS]
                assert len(set(begins)) == len(begins) and max(begins) < batch["bytes"]
                assert batch["bytes"] <= made["buffers"][batch["buffer"]][2]
        text = unpacked(site, made["text"])
        assert text["capacity"] == 48 and set(text["programs"]) == {"1", "32", "48"}
        for length, programs in text["programs"].items():
            assert programs["batch"]["seq"] == int(length) and programs["batch"]["batch"] == 1
            assert programs["logits"][2] == 4 * 88  # in whole blocks


def test_a_page_lies_beside_its_model_and_its_example(site, manifest, place):
    for path in page_folder().rglob("*"):
        assert (site.folder / path.relative_to(page_folder())).exists()
    assert manifest["sample"] == "rows.jsonl"
    assert (site.folder / "rows.jsonl").read_bytes() == (place / "rows.jsonl").read_bytes()
    tokenizer = (place / "model" / "tokenizer.json").read_bytes()
    text = manifest["text"]
    assert (site.folder / text["tokenizer"]).read_bytes() == tokenizer
    assert text["rows"]["max_length"] == 48 and text["rows"]["refuses_images"] is False
    assert text["eos_ids"] == [1] and text["special_tokens"]["eos_token"] == "</s>"
    assert "<|assistant|>" in text["template"] and text["tool_template"] is None
    formats = unpacked(site, text["prompts"])
    assert set(formats) == {"chat", "alpaca", "text"}
    for each in formats.values():
        assert "tokenizer_config.json" in each["files"] and "tokenizer.json" not in each["files"]


def test_other_folders_and_files_are_refused(site, place, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not a site"):
        write_page(settings(place), tmp_path)
    for name in ("rows.parquet", "none.jsonl"):
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        config = settings(place, data={"train": str(tmp_path / name)})
        with pytest.raises(DataError, match=f"{name} cannot be included"):
            write_page(config, tmp_path / "site", with_data=True)
    with pytest.raises(ConfigError, match=r"optim\.name = lion"):
        write_page(settings(place, optim={"name": "lion"}), tmp_path / "site")
    assert not (tmp_path / "site").exists()
    assert site.moved(tmp_path).folder == tmp_path


def test_an_example_whose_rows_have_no_room_is_refused(place, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a b" * 10, "completion": "c"}) + "\n")
    config = settings(place, data={"train": str(rows), "max_seq_length": 64})
    options = SiteOptions(buckets=(4, 16))
    with pytest.raises(DataError, match="max_seq_length=16"):
        write_page(config, tmp_path / "site", options, with_data=True)


@pytest.mark.parametrize(
    ("embedding", "angles", "embedded", "told"),
    [
        (None, False, False, None),
        (SimpleNamespace(name="embed"), False, False, "LoRA on embed is not supported"),
        (None, True, False, "RoPE that depends on the sequence length"),
        (None, False, True, "embeddings in host memory"),
    ],
)
def test_models_that_a_page_cannot_compute_are_refused(embedding, angles, embedded, told):
    batch = SimpleNamespace(angles=angles, embedded=embedded)
    adapter = SimpleNamespace(embedding=embedding)
    asked = []
    layout = SimpleNamespace(
        adapter=adapter, step=lambda options: asked.append(options) or SimpleNamespace(batch=batch)
    )
    if told is None:
        check_model(layout)
        assert asked == [StepOptions("loss", 1, 32)]
    else:
        with pytest.raises(ConfigError, match=told):
            check_model(layout)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({}, {"random": False, "packing": False, "grouped": True}),
        ({"lora": {"lora_dropout": 0.5}}, {"random": True}),
        ({"lora": {"lora_dropout": 1e-6}}, {"random": True}),
        ({"train": {"neftune_noise_alpha": 0.5}}, {"random": True}),
        ({"data": {"train": "a", "group_by_length": False}}, {"grouped": False}),
        (
            {"data": {"train": "a", "group_by_length": True, "packing": True}},
            {"grouped": False, "packing": True},
        ),
        (
            {
                "train": {
                    "per_device_train_batch_size": 3,
                    "gradient_accumulation_steps": 5,
                    "num_train_epochs": 7,
                    "seed": 11,
                },
                "optim": {"learning_rate": 0.125, "lr_scheduler_type": "linear",
                          "warmup_ratio": 0.25, "adam_beta1": 0.5, "adam_beta2": 0.75,
                          "loraplus_lr_ratio": 4.0},
            },
            {"batch_size": 3, "accumulation": 5, "epochs": 7, "seed": 11, "learning_rate": 0.125,
             "scheduler": "linear", "warmup_ratio": 0.25, "beta1": 0.5, "beta2": 0.75,
             "loraplus": 4.0},
        ),
    ],
)  # fmt: skip
def test_the_page_trains_as_the_run_is_set(sections, told):
    config = Config.model_validate({"model": {"path": "base"}, **sections})
    assert told.items() <= _training(config).items()


def test_rows_are_as_long_as_asked_or_as_the_runs():
    config = Config.model_validate({
        "model": {"path": "base"}, "data": {"train": "a", "max_seq_length": 40}
    })  # fmt: skip
    assert _buckets(config, SiteOptions()) == [32, 40]
    assert _buckets(config, SiteOptions(buckets=(9, 7, 9))) == [7, 9]
    data = config.data.model_copy(update={"max_seq_length": 2})
    assert _buckets(config.model_copy(update={"data": data}), SiteOptions()) == [2]


# ---- plans ---------------------------------------------------------------------------------------


class Launch(SimpleNamespace):
    """A launch of some seconds on a slow GPU, if its work is a matter of bytes."""

    def part(self, *box):
        return Launch(**{**vars(self), "workgroups": tuple(b for b in box[1])})


def launch(label, tensors=(), *, nbytes=0, has_parts=True, workgroups=(8, 1, 1), size=(8, 8, 1)):
    names = [f"t{i}" for i in range(len(tensors))]
    bindings = {name: SimpleNamespace(index=10 + i) for i, name in enumerate(names)}
    shader = SimpleNamespace(
        label=label, code="a  \n\n// b\nc", workgroup_size=size, bindings=bindings
    )
    return Launch(
        shader=shader, tensors=dict(zip(names, tensors, strict=True)), path=None, flops=0,
        nbytes=nbytes, has_parts=has_parts, workgroups=workgroups,
        params=np.array([7, 9], np.uint32).tobytes(),
    )  # fmt: skip


class Tensor:
    def __init__(self, nbytes, storage=None, offset=0):
        self.nbytes, self.storage, self.offset = nbytes, storage, offset


def test_a_window_is_of_a_buffer_or_of_a_slot():
    whole = SimpleNamespace(buffer=SimpleNamespace(number=5))
    kept = Tensor(12, SimpleNamespace(whole=whole, first_byte=256), offset=512)
    passing = Tensor(8)
    plan = SimpleNamespace(slot_of={passing: 3})
    assert window_json(plan, kept) == [5, 768, 12]
    assert window_json(plan, passing) == [-4, 0, 8]


def test_shaders_are_numbered_once_and_without_their_comments():
    shaders = Shaders()
    made = [
        launch("a", [1, 2]),
        launch("b", [1, 2, 3], size=(16, 4, 2)),
        launch("c", [1], size=(1, 2, 1)),
    ]
    assert [shaders.number(each) for each in (*made, *made)] == [0, 1, 2] * 2
    assert shaders.max_bindings == 3 and shaders.max_invocations == 128
    assert shaders.as_json() == [{"label": label, "code": "a\nc"} for label in "abc"]


@pytest.mark.parametrize(("has_parts", "seconds"), [(True, 0.45), (True, 2.2), (False, 2.2)])
@pytest.mark.cover("all")
def test_launches_that_would_take_too_long_are_cut(monkeypatch, has_parts, seconds):
    slow = CostModel.of_kind("IntegratedGPU", 0.5)
    nbytes = int(seconds * slow.bytes_per_second)
    boxes = [((0, 0, 0), (2, 1, 1)), ((2, 0, 0), (6, 1, 1))]
    asked = []
    monkeypatch.setattr(variant, "split_grid", lambda *how: asked.append(how) or boxes)
    passing = Tensor(8)
    made = launch("a", [passing], nbytes=nbytes, has_parts=has_parts)
    plan = SimpleNamespace(storages=(), slots=[8], launches=[made], slot_of={passing: 0})
    found = plan_json(plan, Shaders(), None)
    assert found["slots"] == [8]
    whole = [0, [8, 1, 1], [[10, -1, 0, 8]], [7, 9], round(1e6 * slow.seconds(None, 0, nbytes))]
    if has_parts and seconds > 0.5:
        ((grid, count),) = asked
        assert grid == (8, 1, 1) and count == parts_needed(2.2, 0.5) > parts_needed(2.2, 0.625)
        assert [each[1] for each in found["launches"]] == [[2, 1, 1], [6, 1, 1]]
    else:
        assert not asked and found["launches"] == [whole]


def test_contents_of_buffers_follow_one_another():
    places = [[0, 8, 24], [1, 0, 16]]
    filled = FilledBuffers(SimpleNamespace(put=lambda data: places))
    filled.fill(SimpleNamespace(number=7), 100, np.zeros(40, np.uint8))
    assert filled.pieces == []
    filled.fill(SimpleNamespace(number=7), 100, np.ones(40, np.uint8))
    assert filled.pieces == [[7, 100, 0, 8, 24], [7, 124, 1, 0, 16]]


def test_a_model_that_a_page_cannot_train_is_refused(place, tmp_path):
    lora = {"r": 2, "target_modules": ["embed_tokens"]}
    config = settings(place)
    config = Config.model_validate({**config.model_dump(), "lora": lora})
    with pytest.raises(ConfigError, match=r"LoRA on model\.embed_tokens is not supported"):
        write_page(config, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_template_for_tools_is_kept_beside_the_other(place, tmp_path):
    write_model(tmp_path / "model", num_hidden_layers=1)
    assert put_prompts(SiteFiles(tmp_path), tmp_path / "model", settings(place), 32)[
        "tool_template"
    ] is None  # fmt: skip
    (tmp_path / "model" / "chat_template.jinja").write_text("default")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    more = tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja"
    more.write_text("with tools")
    texts = put_prompts(SiteFiles(tmp_path), tmp_path / "model", settings(place), 32)
    assert (texts["template"], texts["tool_template"]) == ("default", "with tools")
    assert texts["rows"]["refuses_images"] is False


def test_files_of_weights_are_as_large_as_hosts_take():
    assert variant.FILE_BYTES == 64 << 20

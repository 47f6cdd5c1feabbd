"""A site holds what training would put onto a device, and needs no GPU to be written."""

import gzip
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from qlora_wgpu.cli.web import web
from qlora_wgpu.config import load_config
from qlora_wgpu.data import PromptFormat, Tokenizer, read_prompt_files
from qlora_wgpu.errors import ConfigError, DataError
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import GPU_PROFILE
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.qlora_model import QLoRAModel
from qlora_wgpu.runs.web import SiteServer, write_page
from qlora_wgpu.training.finish import save_prompt
from qlora_wgpu.web import SiteOptions
from qlora_wgpu.web.site import page_folder, put_prompts
from qlora_wgpu.web.variant import SiteFiles

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "demo" / "demo.yaml"
# Hugging Face's, as npm has them: dist/tokenizers.min.mjs and dist/index.js.
VENDORED = {
    "tokenizers.mjs": "258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a",
    "jinja.mjs": "c8871915dfa68f976c11540c33fc9341c0810ebe29adb7027b8d51f2a8044936",
}


def settings(*overrides: str):
    return load_config(DEMO, overrides)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A site with two ranks, written without a device."""
    out = tmp_path_factory.mktemp("web") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "_choose_profile", None)  # what opening a GPU would call
        site = write_page(settings(), out, SiteOptions(ranks=(4, 8)), with_data=True)
    return site


def plan_of(folder: Path, name: str):
    return json.loads(gzip.decompress((folder / name).read_bytes()))


def test_every_file_that_a_page_fetches_is_listed_with_its_hash(written):
    listed = json.loads((written.folder / "site.json").read_text())["files"]
    assert "shaders.plan" in listed and "weights/000.bin" in listed and "tokenizer.json" in listed
    for name, known in listed.items():
        content = (written.folder / name).read_bytes()
        assert len(content) == known["bytes"]
        assert hashlib.sha256(content).hexdigest() == known["sha256"]


def test_no_path_of_the_machine_is_published(written):
    """Whoever opens the page sees the model's name, not in whose folders it lay."""
    for path in written.folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".plan" else content
            assert str(DEMO.parent).encode() not in text, path
    assert json.loads((written.folder / "site.json").read_text())["model"]["name"] == "base"
    variant = plan_of(written.folder, "plans/r4/variant.plan")
    assert variant["adapter"]["config"]["base_model_name_or_path"] is None


def test_two_sites_of_a_run_have_the_same_bytes(written, tmp_path):
    again = write_page(settings(), tmp_path / "again", SiteOptions(ranks=(4, 8)), with_data=True)
    for path in sorted(written.folder.rglob("*")):
        if path.is_file():
            same = again.folder / path.relative_to(written.folder)
            assert same.read_bytes() == path.read_bytes(), path


@pytest.mark.parametrize("rank", [4, 8])
def test_buffers_are_filled_with_what_training_uploads(written, device, rank):
    site = json.loads((written.folder / "site.json").read_text())
    variant = plan_of(written.folder, f"plans/r{rank}/variant.plan")
    weights = [(written.folder / name).read_bytes() for name in site["weights"]]
    filled = {}
    for buffer, offset, file, begin, nbytes in variant["filled"]:
        content = filled.setdefault(buffer, bytearray(variant["buffers"][buffer][2]))
        content[offset : offset + nbytes] = weights[file][begin : begin + nbytes]
    config = settings(f"lora.r={rank}", f"lora.lora_alpha={2 * rank}")
    pretrained = Pretrained.open(config.model.path)
    layout = ModelPlan(
        pretrained, config.lora, config.quant, config.train.compute_dtype,
        profile=GPU_PROFILE, max_binding=128 << 20,
    )  # fmt: skip
    model = QLoRAModel(layout, device, seed=config.train.seed)
    plan = layout.step(model.options.step("train", 16, 32)).plan
    assert variant["adapter"]["config"]["lora_alpha"] == 2 * rank
    steps = plan_of(written.folder, variant["steps"]["32"])["train"]
    numbers = {w[1] for launch in steps["launches"] for w in launch[2] if w[1] >= 0}
    by_label: dict[tuple[str, int], list[bytes]] = {}
    for number in sorted(numbers):
        label, _, nbytes = variant["buffers"][number]
        content = filled.get(number, bytearray(nbytes))
        by_label.setdefault((label, nbytes), []).append(bytes(content))
    compared = 0
    for storage in plan.storages:
        if storage.buffer is None or storage.kind in ("adapter", "inputs"):
            continue
        uploaded = bytes(device.read(storage.buffer, storage.nbytes))
        same = by_label[storage.label, max(storage.nbytes + -storage.nbytes % 4, 16)]
        assert any(content[: storage.nbytes] == uploaded for content in same), storage.label
        compared += any(uploaded)
    assert compared > 10
    number, floats = variant["adapter"]["parameters"][0]
    parameters = np.frombuffer(bytes(filled[number]), np.float32)[:floats]
    assert np.array_equal(parameters, model.read_flat(model.adapter.parameters))


def test_gpus_of_few_registers_have_plans_of_their_own(written):
    site = json.loads((written.folder / "site.json").read_text())
    cuts = {(v["rank"], tuple(v["vendors"])): v for v in site["variants"]}
    assert set(cuts) == {(rank, v) for rank in (4, 8) for v in ((), ("apple", "intel"))}
    plain, few = (plan_of(written.folder, cuts[8, v]["file"]) for v in ((), ("apple", "intel")))
    assert plain["adapter"] == few["adapter"]
    codes = [shader["label"] for shader in plan_of(written.folder, "shaders.plan")]
    for name, own, other in (("HOLDS_W", few, plain), ("FEW_REGISTERS", few, plain)):
        assert any(f"{name}=True" in codes[i] for i in own["shaders"])
        assert not any(f"{name}=True" in codes[i] for i in other["shaders"])
    # The same weights are there once.
    assert {piece[2] for piece in few["filled"]} == {piece[2] for piece in plain["filled"]}
    assert sum(site["files"][name]["bytes"] for name in site["weights"]) == written.weight_bytes
    of_software = SiteOptions(ranks=(4,), kernels="cpu", buckets=(32,))
    other = write_page(settings(), written.folder.parent / "cpu", of_software)
    (variant,) = json.loads((other.folder / "site.json").read_text())["variants"]
    assert variant["vendors"] == []


def test_windows_lie_within_their_buffers_and_slots(written):
    variant = plan_of(written.folder, "plans/r8/variant.plan")
    sizes = [nbytes for _, _, nbytes in variant["buffers"]]
    plans = [variant["update"]]
    for name in variant["steps"].values():
        plans += plan_of(written.folder, name).values()
    for made in plan_of(written.folder, variant["text"])["programs"].values():
        plans += [made["hidden"], made["head"]]
    shaders = plan_of(written.folder, "shaders.plan")
    for plan in plans:
        for shader, workgroups, windows, _, microseconds in plan["launches"]:
            assert 0 <= shader < len(shaders) and max(workgroups) <= 65_535
            assert 10 <= microseconds <= 500_000  # of a slow GPU, and a small model
            for _, memory, offset, nbytes in windows:
                room = sizes[memory] if memory >= 0 else plan["slots"][-1 - memory]
                assert offset % 256 == 0 and offset + nbytes <= room


def test_the_memory_told_is_what_the_plans_take(written):
    assert set(written.memory) == {4, 8}
    for lengths in written.memory.values():
        assert list(lengths) == [32, 48, 64]
        assert list(lengths.values()) == sorted(lengths.values())


def test_slots_serve_all_plans_and_their_shaders_are_named(written):
    variant = plan_of(written.folder, "plans/r8/variant.plan")
    plans = [variant["update"]]
    for name in variant["steps"].values():
        plans += plan_of(written.folder, name).values()
    for made in plan_of(written.folder, variant["text"])["programs"].values():
        plans += [made["hidden"], made["head"]]
    assert variant["shaders"] == sorted({launch[0] for p in plans for launch in p["launches"]})
    sizes = [sorted(plan["slots"], reverse=True) for plan in plans]
    most = [max(each[i] for each in sizes if i < len(each)) for i in range(max(map(len, sizes)))]
    assert variant["slots"] == most


def test_the_start_of_dora_is_left_to_the_page(tmp_path):
    site = write_page(settings("lora.use_dora=true", "lora.r=4"), tmp_path / "site")
    variant = plan_of(site.folder, "plans/r4/variant.plan")
    layers = {name.rsplit(".lora_", 1)[0] for name in variant["adapter"]["tensors"]}
    assert len(variant["start"]) == len(layers) > 10
    places = [place for place, *_ in variant["adapter"]["tensors"].values()]
    assert {start["to"][1] // 4 for start in variant["start"]} <= set(places)


def test_plans_need_no_more_than_webgpu_promises(written):
    site = json.loads((written.folder / "site.json").read_text())
    promised = {
        "maxStorageBuffersPerShaderStage": 8,
        "maxComputeInvocationsPerWorkgroup": 256,
        "maxStorageBufferBindingSize": 128 << 20,
        "maxBufferSize": 256 << 20,
    }
    assert all(value <= promised[name] for name, value in site["needs"].items())


def test_no_shader_needs_a_feature(written):
    """The page asks a device for none."""
    for shader in plan_of(written.folder, "shaders.plan"):
        used = r"\benable\b|\bf16\b|\b(?:subgroup|quad)[A-Z_]|\bnum_subgroups\b|@builtin\(subgroup"
        assert not re.search(used, shader["code"]), shader["label"]


@pytest.mark.parametrize("kind", ["chat", "alpaca", "text"])
@pytest.mark.parametrize("template", [None, "zephyr"])
def test_the_prompts_of_an_adapter_are_kept_as_a_run_keeps_them(tmp_path, kind, template):
    config = settings() if template is None else settings(f"data.chat_template={template}")
    site = write_page(config, tmp_path / "site", SiteOptions(buckets=(32,)))
    kept = plan_of(site.folder, "prompts.plan")[kind]
    rows = {"chat": "messages", "alpaca": "instruction/output", "text": "text"}[kind]
    base = Path(config.model.path)
    (tmp_path / "adapter").mkdir()
    prompt = PromptFormat.of_rows(rows, Tokenizer.from_folder(base), config.data.chat_template)
    save_prompt(config, base, prompt, tmp_path / "adapter")
    files = [path for path in (tmp_path / "adapter").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {*kept["files"], "tokenizer.json"}
    for path in files:
        stored = kept["files"].get(path.name)
        content = stored.encode() if stored else (site.folder / path.name).read_bytes()
        assert path.read_bytes() == content
    assert kept["turn_end"] == prompt.turn_end and kept["stop_text"] == prompt.stop_text
    assert read_prompt_files(tmp_path / "adapter").kind == kind


def test_a_site_has_the_template_for_conversations_with_tools(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(settings().model.path, base)
    (base / "chat_template.jinja").write_text("default")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool_use.jinja").write_text("with tools")
    for template, told in (("null", ("default", "with tools")), ("with {{ messages }}", None)):
        config = settings(f"model.path={base}", f"data.chat_template={template}")
        texts = put_prompts(SiteFiles(tmp_path / "out"), base, config, 32)
        assert (texts["template"], texts["tool_template"]) == (told or (template, None))


@pytest.mark.parametrize("base", ["base", "images/base"])
def test_rows_with_images_are_refused_if_the_model_reads_them(tmp_path, base):
    config = settings(f"model.path={DEMO.parent / base}", "lora.r=2")
    site = write_page(config, tmp_path / "site", SiteOptions(buckets=(32,)))
    rows = json.loads((site.folder / "site.json").read_text())["text"]["rows"]
    assert rows["refuses_images"] == (base == "images/base")


def test_vendored_libraries_are_those_of_npm():
    for name, known in VENDORED.items():
        content = (page_folder() / "vendor" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == known
        assert (page_folder() / "vendor" / f"LICENSE.{name.partition('.')[0]}").is_file()


def test_the_page_names_no_other_server(written):
    policy = (written.folder / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for path in written.folder.glob("*.*"):
        if path.suffix in (".mjs", ".html", ".css"):
            assert "://" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("lora.init_lora_weights=pissa", "lora.init_lora_weights"),
        ("train.objective=dpo", "train.objective"),
        ("data.columns={weight: w}", "row weights"),
        ("lora.trainable_token_indices=[1]", "lora.trainable_token_indices"),
        ("lora.modules_to_save=[lm_head]", "lora.modules_to_save"),
        ("optim.name=lion", "optim.name = lion is not supported in a browser"),
        ("data.truncation=windows", "data.truncation = windows is not supported in a browser"),
        ("train.objective=kto", "train.objective = kto is not supported in a browser"),
        ("train.objective=orpo", "train.objective"),
        ("lora.init_from=elsewhere", "lora.init_from"),
        ("optim.lr_scheduler_type=polynomial", "optim.lr_scheduler_type"),
        ("optim.lr_scheduler_kwargs={num_cycles: 2}", "optim.lr_scheduler_kwargs"),
    ],
)
def test_what_a_browser_does_not_train_is_refused(tmp_path, override, told):
    with pytest.raises(ConfigError, match=told):
        write_page(settings(override), tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not a site"):
        write_page(settings(), tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_port_beyond_all_is_refused(written):
    with pytest.raises(ConfigError, match="cannot use port 99999"):
        SiteServer(written.folder, 99_999)


def test_rows_of_one_token_are_refused():
    found = CliRunner().invoke(web, [str(DEMO), "--out", "site", "--lengths", "1"])
    assert isinstance(found.exception, ConfigError) and "--lengths" in str(found.exception)


def test_an_example_must_be_of_a_kind_that_a_page_reads(tmp_path):
    rows = tmp_path / "rows.parquet"
    rows.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"\.jsonl"):
        write_page(settings(f"data.train={rows}"), tmp_path / "site", with_data=True)


def test_an_example_without_labels_is_refused(tmp_path):
    """Else its button would fail for whoever opens the page."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    with pytest.raises(DataError, match="line 1: a row must have"):
        write_page(settings(f"data.train={rows}"), tmp_path / "site", with_data=True)
    assert not (tmp_path / "site").exists()
    rows.write_text(json.dumps({"prompt": "a " * 30, "completion": "b"}) + "\n")
    write_page(settings(f"data.train={rows}"), tmp_path / "site", with_data=True)
    with pytest.raises(DataError, match="max_seq_length=16"):
        write_page(
            settings(f"data.train={rows}"), tmp_path / "site", SiteOptions(buckets=(16,)),
            with_data=True,
        )  # fmt: skip


def test_a_damaged_base_leaves_the_old_site(written, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(DEMO.parent / "base", base)
    out = tmp_path / "site"
    shutil.copytree(written.folder, out)
    before = (out / "site.json").read_bytes()
    file = next(base.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match="safetensors"):
        write_page(settings(f"model.path={base}"), out)
    assert (out / "site.json").read_bytes() == before

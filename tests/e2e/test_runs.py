"""Runs from Python: what the commands do, told to an observer, and nothing done twice."""

import dataclasses
from collections import Counter

import pytest
from families.small_configs import read
from support.observing import observed

import qlora_wgpu
from e2e.tiny import write_chats, write_model
from qlora_wgpu import runs
from qlora_wgpu.checkpoint import ModelFolder
from qlora_wgpu.errors import CallbackError, ConfigError, DataError
from qlora_wgpu.families import parts
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.model import model_plan
from qlora_wgpu.runs import opening
from qlora_wgpu.runs.workload import TrainingWorkload
from qlora_wgpu.training import Observer
from qlora_wgpu.training.data import check_ids
from qlora_wgpu.training.observers import EVENTS

CONFIG = """\
model: {path: model}
lora: {r: 4, lora_alpha: 8}
data: {train: train.jsonl, eval: eval.jsonl, max_seq_length: 64}
train: {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 1}
optim: {learning_rate: 1e-2}
device: {tune: never}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_model(folder / "model")
    write_chats(folder / "train.jsonl")
    held_out = write_chats(folder / "eval.jsonl", 6, seed=1)
    held_out.write_text(held_out.read_text().replace("what is", "name"))  # none is learnt, too
    (folder / "run.yaml").write_text(CONFIG)
    return folder


class Recorder(Observer):
    """Keeps the names of events, a repeated one once, and what came with them."""

    def __init__(self):
        self.names = []
        self.details = {}


def recorded(event):
    def tell(self, *details):
        if not self.names or self.names[-1] != event:
            self.names.append(event)
        self.details[event] = details

    return tell


for each in EVENTS:
    setattr(Recorder, each, recorded(each))


def train(place, name, observer=None, **options):
    output = f"output.dir={place / name}"
    return qlora_wgpu.train(
        place / "run.yaml", callbacks=observed(observer), overrides=[output], **options
    )


@pytest.fixture
def counts(monkeypatch):
    """How often a folder is opened, a config.json interpreted, and each step traced."""
    monkeypatch.delenv(opening.VERIFY_VARIABLE)
    counts, checking = Counter(), []
    launches_of = TrainingWorkload.launches
    open_folder, read = ModelFolder.open, parts.DecoderFamily.read
    trace_step, logits_graphs = model_plan.trace_step, model_plan.ModelPlan.logits_graphs

    def counted_open(path):
        counts["opened"] += 1
        return open_folder(path)

    def counted_read(self, config):
        counts["read"] += 1
        return read(self, config)

    def counted_step(graph, base, modules, options, stats):
        counts["loss", graph.profile, options] += 1
        return trace_step(graph, base, modules, options, stats)

    def counted_hidden(self, batch, samples=0):
        counts["hidden", self.profile, batch.batch, batch.seq, batch.span, bool(checking)] += 1
        return logits_graphs(self, batch, samples)

    def checked_launches(*args):
        """A text names what the driver is checked for; a run's own may be as long by chance."""
        checking.append(True)
        launches = list(launches_of(*args))
        checking.pop()
        return launches

    monkeypatch.setattr(ModelFolder, "open", staticmethod(counted_open))
    monkeypatch.setattr(parts.DecoderFamily, "read", counted_read)
    monkeypatch.setattr(model_plan, "trace_step", counted_step)
    monkeypatch.setattr(model_plan.ModelPlan, "logits_graphs", counted_hidden)
    monkeypatch.setattr(TrainingWorkload, "launches", checked_launches)
    return counts


def assert_traced_once(counts):
    """Texts are planned before there is a cache that they use, and traced for it once more."""
    for key, count in counts.items():
        assert count == 1 or (key[0] == "hidden" and count == 2), (key, count)


def test_nothing_is_opened_interpreted_or_traced_twice(place, counts):
    train(place, "once")
    assert counts.pop("opened") == 1
    assert counts.pop("read") == 1
    kinds = Counter(key[0] for key in counts)
    # Prompt and next token: of the text that names what the driver is checked for, of the sample.
    assert kinds["loss"] >= 2 and kinds["hidden"] == 4, kinds
    assert_traced_once(counts)


@pytest.mark.full
def test_another_profile_is_traced_anew(place, counts, monkeypatch):
    """Where the tuner cuts kernels otherwise, the first plan is not the one that runs."""
    from qlora_wgpu.tuning.tuner import Choice

    def choose(device, task, another, progress):
        device.profile = dataclasses.replace(device.profile, logits_bytes=1 << 18)
        return Choice(device.profile, ("all: smaller chunks",))

    monkeypatch.setattr(opening, "tuned", choose)
    observer = Recorder()
    qlora_wgpu.train(
        place / "run.yaml",
        callbacks=observed(observer),
        overrides=[f"output.dir={place / 'tuned'}", "device.tune=always"],
    )
    assert observer.details["tuned"] == (("all: smaller chunks",),)
    assert counts.pop("opened") == counts.pop("read") == 1
    assert_traced_once(counts)
    profiles = {part for key in counts for part in key if isinstance(part, Profile)}
    assert len(profiles) == 2


def test_a_run_tells_what_the_command_shows(place):
    observer = Recorder()
    result = train(place, "told", observer)
    order = list(dict.fromkeys(name for name in observer.names))
    assert order == [
        "activity", "planned", "planned_on_host", "loading", "setup", "sampled", "started",
        "evaluation", "step", "saved", "finished", "reported",
    ]  # fmt: skip
    _, done, total = observer.details["loading"]
    assert done == total > 10
    [setup] = observer.details["setup"]
    assert (setup.train_rows, setup.eval_rows, setup.rank) == (24, 6, 4)
    [sample] = observer.details["sampled"]
    assert sample == result.sample and sample.prompt and sample.before
    assert observer.details["reported"] == (result.reports,)
    assert result.reports[0] == place / "told" / "report.html"
    assert all(path.is_file() for path in result.reports)
    assert result.steps == 3 and (result.adapter_dir / "adapter_config.json").is_file()


def test_a_config_a_mapping_and_a_file_are_the_same_run(place, monkeypatch):
    monkeypatch.chdir(place)
    config = qlora_wgpu.load_config("run.yaml", ["output.dir=as-config"])
    mapping = {**config.model_dump(), "output": {"dir": "as-mapping"}}
    adapters = [
        (result.adapter_dir / "adapter_model.safetensors").read_bytes()
        for result in (
            qlora_wgpu.train(config),
            qlora_wgpu.train(mapping),
            train(place, "as-file"),
        )
    ]
    assert len(set(adapters)) == 1


def test_an_existing_run_is_kept_replaced_or_gone_on_with(place):
    train(place, "again")
    with pytest.raises(ConfigError, match="already contains a run"):
        train(place, "again")
    with pytest.raises(ConfigError, match="are mutually exclusive"):
        train(place, "again", overwrite=True, resume=True)
    assert train(place, "again", overwrite=True).steps == 3
    observer = Recorder()
    assert train(place, "resumed", observer, resume=True).steps == 3  # there was none
    assert "resumed" not in observer.names


@pytest.mark.quick
def test_overrides_belong_to_a_file(place):
    with pytest.raises(ConfigError, match="need a YAML file"):
        qlora_wgpu.train({"model": {"path": "x"}}, overrides=["train.max_steps=1"])


def test_evaluate(place, counts):
    result = train(place, "evaluated")
    counts.clear()
    overrides = [f"output.dir={place / 'evaluated'}"]
    evaluation = qlora_wgpu.evaluate(place / "run.yaml", overrides=overrides)
    assert counts["opened"] == counts["read"] == 1
    assert evaluation.adapter_path == str(result.adapter_dir)
    assert evaluation.base.loss == pytest.approx(result.eval_loss_before, rel=1e-5)
    assert evaluation.adapter.loss == pytest.approx(result.eval_loss, rel=1e-5)
    assert evaluation.adapter.loss < evaluation.base.loss and evaluation.base.perplexity > 1


def test_estimate_and_prepare(place, counts):
    estimate = qlora_wgpu.estimate(place / "run.yaml", rank=8, budget=1 << 20)
    assert (estimate.workload.step.batch, estimate.workload.step.seq) == (2, 64)
    assert estimate.workload.lora.r == 8 and estimate.fits is not None
    assert estimate.total == sum(estimate.memory.values())
    assert counts["opened"] == counts["read"] == 1  # the form of weights is read
    allowed = qlora_wgpu.estimate(place / "run.yaml", overrides=["device.memory=1MiB"], rank=8)
    assert (allowed.budget, allowed.fits) == (1 << 20, estimate.fits)
    prepared = runs.prepare(place / "run.yaml", held_out=True)
    assert len(prepared.dataset) == 6 and prepared.plan.total_steps == 3


@pytest.mark.quick
def test_ids_that_the_model_does_not_have_are_refused(place):
    dataset = runs.prepare(place / "run.yaml").dataset
    largest = dataset.max_token_id
    of, media = read("llama", vocab_size=largest + 1), range(largest, largest + 9)
    check_ids("train.jsonl", dataset, of)
    with pytest.raises(DataError, match=r"train.jsonl: example \d+ has the token id"):
        check_ids("train.jsonl", dataset, read("llama", vocab_size=largest))
    with pytest.raises(DataError, match=rf"train.jsonl: example \d+ .* {largest}, a token of ima"):
        check_ids("train.jsonl", dataset, dataclasses.replace(of, media_ids=(media,)))


class PageReader(Observer):
    """Keeps the page as it is at each evaluation, and may end the run there."""

    def __init__(self, page, ending=None):
        self.page, self.ending, self.read = page, ending, []

    def saved(self, folder):
        self.read.append(self.page.read_text() if self.page.exists() else "")
        if self.ending is not None:
            raise self.ending


def test_the_page_is_there_while_the_run_goes_on(place, monkeypatch):
    for name in ("_INTERVAL", "_SHARE"):
        monkeypatch.setattr(f"qlora_wgpu.runs.reporting.{name}", 0.0)
    reader = PageReader(place / "live" / "report.html")
    result = train(place, "live", reader)
    assert reader.read and all('http-equiv="refresh"' in page for page in reader.read)
    assert "the run is in progress" in reader.read[0] and "steps</small><b>3<" in reader.read[0]
    text = reader.page.read_text()
    assert "refresh" not in text and "finished after step 3" in text and "perplexity after" in text
    assert len(result.samples) == 3 and result.sample == result.samples[0]
    for part in ("before training", "after training", "from Python"):
        assert part in text
    assert text.count("<dt>after training<") == sum(bool(sample.after) for sample in result.samples)


def test_the_page_of_a_run_that_fails_says_so(place):
    reader = PageReader(place / "failed" / "report.html", ending=RuntimeError("no <luck>"))
    with pytest.raises(CallbackError, match="no <luck>"):
        train(place, "failed", reader)
    text = reader.page.read_text()
    assert "ended with an error: PageReader.saved failed: RuntimeError: no &lt;luck&gt;" in text
    assert "refresh" not in text


def test_a_run_that_may_not_begin_leaves_the_page_of_another(place):
    train(place, "kept")
    before = (place / "kept" / "report.html").read_text()
    with pytest.raises(ConfigError, match="already contains a run"):
        train(place, "kept")
    train(place, "kept", resume=True)
    assert (place / "kept" / "report.html").read_text() == before

"""What commands print of results: tables, verdicts and JSON, of made-up results."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.cli import data, doctor, estimate, eval, exporting, serve, train, watch
from qlora_wgpu.cli._terminal import Terminal
from qlora_wgpu.data.dataset import Subset
from qlora_wgpu.errors import DeviceError
from qlora_wgpu.model.offload_plan import RESIDENT
from qlora_wgpu.runs.estimation import MOST_TOKENS, Fits
from qlora_wgpu.runs.evaluation import Evaluation, HeldOutLoss, Prediction
from qlora_wgpu.training.batching import BatchSampler


def rows_of(*shown):
    """The lines that are printed, each with single spaces."""
    console = Console(file=io.StringIO(), width=300)
    for each in shown:
        console.print(each)
    lines = console.file.getvalue().splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


# ---- estimate ------------------------------------------------------------------------------------


def fitted(*, checkpointing=False, recomputed="layers", kinds=(), remakes=False, host=0):
    offload = SimpleNamespace(remakes=remakes, in_words=lambda n: [(k, "") for k in kinds])
    return SimpleNamespace(
        options=SimpleNamespace(checkpointing=checkpointing), recomputed=recomputed,
        layout=SimpleNamespace(num_layers=4), offload=offload, host_memory={"a": host, "b": host},
    )  # fmt: skip


@pytest.mark.parametrize(("seq", "text"), [
    (0, "-"), (1, "1"), (MOST_TOKENS - 1, "65,535"), (MOST_TOKENS, "65,536+"),
])  # fmt: skip
def test_the_longest_row_is_open_at_the_end_of_what_is_tried(seq, text):
    assert estimate._tokens(seq) == text


@pytest.mark.parametrize(("options", "text"), [
    ({}, "nothing"), ({"checkpointing": True}, "layers recomputed"),
    ({"remakes": True}, "norms and gated units recomputed"),
    ({"checkpointing": True, "remakes": True}, "layers recomputed"),
    ({"kinds": ("weights", "moments")}, "weights, moments offloaded"),
    ({"remakes": True, "kinds": ("moments",)},
     "norms and gated units recomputed; moments offloaded"),
])  # fmt: skip
def test_what_is_recomputed_and_offloaded(options, text):
    assert estimate._recomputed_and_offloaded(fitted(**options)) == text


def plan(gib, *, fits=True, slow_down=1.25, host=0):
    fit = fitted(kinds=("moments",), host=host) if fits else None
    return SimpleNamespace(
        gib=gib, room=gib << 30, resident_seq=1024, longest_seq=0, fitted=fit, slow_down=slow_down
    )


@pytest.mark.parametrize(("largest", "more"), [(79, True), (80, False)])
def test_a_row_for_each_size_of_gpu(largest, more):
    plans = (
        plan(8, fits=False), plan(12, slow_down=None), plan(16, host=3 << 29), plan(largest)
    )  # fmt: skip
    head, *rows = rows_of(estimate.cards_table(plans, 2, 4096))[:6]
    assert head.startswith("GPU longest offloading 2 x 4,096 tokens: recomputed / offloaded host")
    assert rows[:4] == [
        "8 GB 1,024 - does not fit", "12 GB 1,024 - does not fit",
        "16 GB 1,024 - moments offloaded 3.0 GiB 1.25x",
        f"{largest} GB 1,024 - moments offloaded - 1.25x",
    ]  # fmt: skip
    assert (rows[4] == "more same as the last") == more
    assert rows_of(estimate.cards_table((), 1, 1))[0].startswith("GPU")


def test_a_plan_in_json():
    what = {"card_gb": 8, "room": 8 << 30, "resident_seq": 1024, "longest_seq": 0}
    none = {**what, "fits": False, "slow_down": 1.25, "fitted": None}
    assert estimate._plan_in_json(plan(8, fits=False)) == none
    found = plan(8)
    found.fitted = SimpleNamespace(
        memory={"weights": 5}, total=5, host_memory={"moments": 7}, moved=11, offload=RESIDENT,
        options=SimpleNamespace(checkpointing=True),
    )  # fmt: skip
    made = estimate._plan_in_json(found)
    assert made["fits"] is True and made["fitted"].items() >= {
        "bytes": {"weights": 5}, "total": 5, "host_bytes": {"moments": 7}, "moved_bytes": 11,
        "gradient_checkpointing": True,
    }.items()  # fmt: skip


@pytest.mark.parametrize(("total", "batch", "seq", "text"), [
    (2**30, 3, 99, "fits; at most batch 3 at sequence 64, or sequence 99 at batch 1"),
    (2**30 + 1, 0, 9, "does not fit; no batch fits at sequence 64, or sequence 9 at batch 1"),
    (2**30 - 1, 1, 0, "fits; at most batch 1 at sequence 64"),
])  # fmt: skip
def test_the_verdict_on_a_budget(total, batch, seq, text):
    step = SimpleNamespace(step=SimpleNamespace(seq=64))
    said = estimate._verdict(
        SimpleNamespace(workload=step, total=total), 2**30, Fits(batch=batch, seq=seq)
    )
    assert said == f"1.0 GiB: {text}"


def test_what_would_fit_instead():
    assert estimate._remedy("").startswith("it does not fit with a smaller")
    assert estimate._remedy("a: 1") == "it would fit without offloading with: a: 1"


@pytest.mark.parametrize(("nbytes", "text"), [
    (2**30, "1.0 GiB"), (2**30 - 1, "1,024.0 MiB"), (3 << 29, "1.5 GiB"), (3 << 19, "1.5 MiB"),
])  # fmt: skip
def test_sizes_from_a_gib_on_are_in_gib(nbytes, text):
    assert estimate._size(nbytes) == text


# ---- eval ----------------------------------------------------------------------------------------

PLAIN = HeldOutLoss(1.0, 1234, 0.5)
ANSWERS = (Prediction("p", "a", " a "), Prediction("q", "b", "c"))


def evaluated(capsys, result, *, as_json):
    eval._show(Terminal(), result, as_json=as_json)
    said = capsys.readouterr().out
    return json.loads(said) if as_json else rows_of(said)


@pytest.mark.parametrize("has_answers", [False, True])
def test_losses_of_base_and_adapter(capsys, has_answers):
    answers = {"base_predictions": ANSWERS[1:], "adapter_predictions": ANSWERS}
    better = HeldOutLoss(0.5, 1234, None)
    result = Evaluation("d", "f", PLAIN, better, **(answers if has_answers else {}))
    head, base, adapter = evaluated(capsys, result, as_json=False)
    assert head == "loss perplexity token accuracy tokens" + " exact match" * has_answers
    assert base == "base 1.0000 2.72 50.0% 1,234" + " 0.0%" * has_answers
    assert adapter == "adapter 0.5000 1.65 0.0% 1,234" + " 50.0%" * has_answers
    made = evaluated(capsys, result, as_json=True)
    assert made["data"] == "d" and made["adapter_path"] == "f"
    assert made["base"] == {
        "loss": 1.0, "perplexity": PLAIN.perplexity, "mean_token_accuracy": 0.5, "tokens": 1234,
        **({"exact_match": 0.0} if has_answers else {}),
    }  # fmt: skip
    assert made["adapter"].get("exact_match") == (0.5 if has_answers else None)


def test_the_base_alone_has_no_row_of_an_adapter(capsys):
    result = Evaluation("d", None, PLAIN, None)
    assert len(evaluated(capsys, result, as_json=False)) == 2
    assert evaluated(capsys, result, as_json=True).keys() == {"data", "adapter_path", "base"}


@pytest.mark.parametrize(("metric", "counted", "in_json"), [
    ("reward", "completions", "completions"), ("accuracy", "answers or pairs", "answers"),
])  # fmt: skip
def test_metrics_of_other_objectives(capsys, metric, counted, in_json):
    base = HeldOutLoss(1.0, 1234, None, {metric: 0.25})
    adapter = HeldOutLoss(0.5, 7, None, {metric: 0.5, "more": 2.0})
    result = Evaluation("d", "f", base, adapter)
    assert evaluated(capsys, result, as_json=False) == [
        "base adapter", "loss 1.0000 0.5000", f"{metric} 0.2500 0.5000", "more 0.0000 2.0000",
        f"{counted} 1,234 7",
    ]  # fmt: skip
    assert evaluated(capsys, result, as_json=True)["base"] == {
        "loss": 1.0, in_json: 1234, metric: 0.25,
    }  # fmt: skip


@pytest.mark.parametrize("size", [2, 20, 21])
def test_a_classifiers_confusion_matrix_is_shown_where_it_is_small(capsys, size):
    labels = [f"L{i}" for i in range(size)]
    matrix = [[1000 * i + j for j in range(size)] for i in range(size)]
    own = HeldOutLoss(1.0, 9, None, {"accuracy": 0.5}, labels, matrix)
    result = Evaluation("d", "f", None, own)
    shown = evaluated(capsys, result, as_json=False)
    assert shown[:4] == ["adapter", "loss 1.0000", "accuracy 0.5000", "rows 9"]
    assert ("L1 1,000 1,001" + " 1,002" * (size > 2) in "\n".join(shown)) == (size <= 20)
    made = evaluated(capsys, result, as_json=True)
    assert "base" not in made and made["adapter"] == {
        "loss": 1.0, "rows": 9, "accuracy": 0.5, "labels": labels, "confusion_matrix": matrix,
    }  # fmt: skip


@pytest.mark.parametrize("labels", [["a", "b"], ["a", "b", "c"]])
def test_several_labels_per_row_have_a_row_of_four_counts_each(labels):
    matrix = [[[1, 2], [3, 4000]]] * len(labels)
    _, head, *rows = rows_of(eval._confusion(HeldOutLoss(1.0, 9, None, {}, labels, matrix)))
    assert head == "true negatives false positives false negatives true positives"
    assert rows == [f"{label} 1 2 3 4,000" for label in labels]


@pytest.mark.parametrize("has_adapter", [False, True])
def test_answers_are_written_a_line_each(has_adapter):
    others = [Prediction("p", "a", "x"), Prediction("q", "b", "y")]
    result = Evaluation("d", None, PLAIN, None, others, ANSWERS if has_adapter else ())
    first, second = map(json.loads, eval._lines(result).decode().splitlines())
    assert first == {
        "prompt": "p", "reference": "a", "prediction": " a " if has_adapter else "x",
        "exact_match": has_adapter, **({"base_prediction": "x"} if has_adapter else {}),
    }  # fmt: skip
    assert second["prompt"] == "q" and not second["exact_match"]


# ---- data ----------------------------------------------------------------------------------------


def test_rows_by_their_length():
    lengths = np.array([1, 2, 3, 21, 21, 0, 0] + [11] * 200)
    table = data._histogram(lengths, 2048, "#.")
    shown = rows_of(table)
    assert (
        not table.show_header
        and shown[:1] == ["tokens per row"]
        and shown[-1] == "longest 21, max_seq_length 2,048"
    )
    assert shown[1:-1] == [
        "1–3 3 #", "4–6 0", "7–9 0", f"10–12 200 {'#' * 40}", "13–15 0", "16–18 0",
        "19–21 2 .",
    ]  # fmt: skip


def test_few_short_rows_have_a_bar_for_each_length():
    shown = rows_of(data._histogram(np.array([1, 2, 2]), 8, "#."))
    assert shown[1:-1] == [f"1–1 1 {'#' * 20}", f"2–2 2 {'#' * 40}"]


def test_a_page_has_no_more_pictures_than_it_can_hold(monkeypatch):
    monkeypatch.setattr(data, "thumbnail", lambda image: f"picture of {image.name}")
    image = SimpleNamespace(name="a.png", width=1000, height=20)
    files = SimpleNamespace(tokens=SimpleNamespace(count=lambda image: 4000))
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("ab", add_special_tokens=False)
    example = SimpleNamespace(ids=np.array(ids), labels=np.array(ids), images=["a"] * 150)
    prepared = SimpleNamespace(
        tokenizer=tokenizer, dataset=SimpleNamespace(image_sources={"a": image}), images=files
    )
    monkeypatch.setattr(
        data, "colored", lambda example, tokenizer: data.Text("a").append("b", data._TRAINED_ON)
    )
    first, second = data._samples_of([("1", example), ("2", example)], prepared)
    line = "a.png: 1,000 x 20 pixels, 4,000 tokens"
    assert first.images == [("picture of a.png", line)] * 150
    assert second.images == [("picture of a.png", line)] * 50 + [("", line)] * 100


# ---- others --------------------------------------------------------------------------------------


def result(variant, *, good=True, refusal="", error=1e-7, dtype="float32"):
    return SimpleNamespace(
        check="rope", variant=variant, dtype=dtype, good=good, refusal=refusal, error=error
    )


def test_errors_of_checks_by_kernel_and_type(monkeypatch):
    monkeypatch.setattr(doctor, "checks", lambda: ["rope"])
    found = {
        ("rope", "own"): {"float32": result("own"), "bfloat16": result("own", error=0.015)},
        ("rope", "tiled"): {"float32": result("tiled", refusal="too few registers")},
    }
    shown = rows_of(doctor._errors(found))
    assert shown[0] == "error in" and "own tiled" in shown[2]
    assert shown[-2:] == ["rope 1.0e-07 refused", "1.5e-02"]


@pytest.mark.parametrize(("bad", "said"), [
    ((), "all 2 checks passed"), (("tiled",), "the kernels that this GPU uses passed"),
    (("own",), ""), (("own", "tiled"), ""),
])  # fmt: skip
def test_only_kernels_in_use_condemn_a_gpu(bad, said, capsys):
    found = {
        ("rope", name): {"float32": result(name, good=name not in bad, refusal="why")}
        for name in ("own", "tiled")
    }
    report = lambda: doctor._report_failures(  # noqa: E731
        Terminal(), SimpleNamespace(name="a card"), found
    )
    if said:
        report()
    else:
        with pytest.raises(DeviceError, match="a card miscomputes"):
            report()
    failed = [f"failed: rope, {name}, float32: why" for name in ("own", "tiled") if name in bad]
    assert capsys.readouterr().out.splitlines() == [*failed, *filter(None, [said])]


@pytest.mark.parametrize(("scheme", "double", "text"), [
    ("none", True, "not quantized, bfloat16"), ("int8", True, "int8, bfloat16"),
    ("nf4", True, "NF4, blocks of 64, double scales, bfloat16"),
    ("nf4", False, "NF4, blocks of 64, single scales, bfloat16"),
])  # fmt: skip
def test_how_a_base_was_stored(scheme, double, text):
    settings = SimpleNamespace(
        quant=SimpleNamespace(double_quant=double, blocksize=64),
        train=SimpleNamespace(compute_dtype="bfloat16"),
    )
    source = SimpleNamespace(pretrained=SimpleNamespace(scheme=lambda quant: scheme))
    assert exporting._stored(source, settings) == text


def test_adapters_of_one_form_share_their_memory_on_the_gpu():
    adapters = [
        SimpleNamespace(config=config, device_bytes=nbytes << 20, host_bytes=1 << 20)
        for config, nbytes in (("r 8", 2), ("r 16", 4), ("r 8", 2))
    ]
    model = SimpleNamespace(adapters=dict(enumerate(adapters)))
    said = "3 adapters: 6.0 MiB of GPU memory and 3.0 MiB of host memory"
    assert serve._adapter_memory(model) == said


def train_result(**values):
    return SimpleNamespace(**{
        "metric_for_best_model": "loss", "eval_loss_before": 2.0, "eval_loss": 1.5,
        "best_step": 3, "steps": 9, "best_eval_loss": 1.25, "best_metric": None, "sample": None,
        "interrupted": False, "num_tokens": 12345, "seconds": 1234.0, "peak_bytes": 3 << 19,
        "adapter_dir": "out/adapter", **values,
    })  # fmt: skip


@pytest.mark.parametrize(("values", "rows"), [
    ({}, {"held-out loss": "2.0000 before, 1.5000 after", "best": "1.2500 after step 3"}),
    ({"best_step": 9}, {"held-out loss": "2.0000 before, 1.5000 after"}),
    ({"best_step": None, "eval_loss": None}, {}),
    ({"best_step": None, "eval_loss_before": None}, {}),
    ({"metric_for_best_model": "accuracy", "best_metric": 0.5, "eval_loss": None},
     {"best": "1.2500, accuracy 0.5000, after step 3"}),
    ({"metric_for_best_model": "accuracy", "eval_loss": None}, {"best": "1.2500 after step 3"}),
    ({"best_metric": 0.5, "eval_loss": None}, {"best": "1.2500 after step 3"}),
    ({"metric_for_best_model": train.REWARD, "best_metric": 0.5},
     {"held-out reward": "-2.0000 before, -1.5000 after", "best": "0.5000 after step 3"}),
    ({"metric_for_best_model": train.REWARD, "best_metric": 0.5, "best_step": 9,
      "eval_loss": None}, {}),
    ({"metric_for_best_model": train.REWARD, "best_step": None, "eval_loss_before": None}, {}),
])  # fmt: skip
def test_what_a_run_came_to(values, rows):
    made = train._result_rows(train_result(**values))
    trained = "12,345 tokens in 1,234 s, device memory at most 1.5 MiB"
    assert made == {**rows, "trained": trained, "adapter": "out/adapter"}


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("kind", ["text", "chat", "scores"])
def test_how_a_run_goes_on(capsys, monkeypatch, finished, interrupted, kind):
    monkeypatch.setattr(train, "prompt_kind", lambda folder: kind)
    monkeypatch.setattr(train, "is_scored_adapter", lambda folder: kind == "scores")
    made = train_result(
        was_finished=finished, reports=[], interrupted=interrupted, run_dir="runs/a b"
    )
    train.show_result(Terminal(), made, "the same --resume")
    lines = capsys.readouterr().out.splitlines()
    raised = "to continue it, raise train.num_train_epochs or train.max_steps"
    assert (raised in lines) == finished
    verbs = {
        "text": "generate 'runs/a b' --prompt \"...\"", "chat": "chat 'runs/a b'",
        "scores": "classify 'runs/a b' --text \"...\"",
    }  # fmt: skip
    stopped = "stopped after step 9; a checkpoint is saved, and `the same --resume` continues"
    assert lines[-1] == (stopped if interrupted else f"qlora-wgpu {verbs[kind]}")


@pytest.mark.parametrize(("width", "used"), [(5, 10), (20, 10), (21, 11), (80, 70)])
def test_a_curve_leaves_room_for_its_marks(monkeypatch, width, used):
    given = []
    monkeypatch.setattr(watch, "dots", lambda *args: given.append(args))
    assert watch._plot("loss", [], [], width) == []
    assert given == [([], [], used, watch._PLOT_HEIGHT)]


@pytest.mark.parametrize(("step", "total", "filled"), [
    (0, 8, 0), (1, 8, 1), (4, 8, 4), (7, 8, 7), (8, 8, 8), (9, 8, 8), (3, 0, None),
    (3, None, None),
])  # fmt: skip
def test_a_bar_of_a_run_s_steps(monkeypatch, step, total, filled):
    monkeypatch.setattr(watch, "_BAR_WIDTH", 8)
    view = SimpleNamespace(path="runs/a", step=step, total_steps=total, state="running")
    head = watch._head(view)
    if filled is None:
        assert head.plain == f"runs/a  step {step}  running"
        return
    line, bar = head.renderables
    assert line.plain == f"runs/a  step {step} of {total}  running"
    assert bar.plain == "━" * 8 and bar.style == watch._STYLES[0]
    assert sum(span.end - span.start for span in bar.spans) == 8 - filled  # which are dim


@pytest.mark.parametrize("rewards", [False, True])
def test_what_is_drawn_of_a_run(monkeypatch, rewards):
    drawn = []
    monkeypatch.setattr(watch, "_plot", lambda title, *given: drawn.append((title, *given)) or [])
    monkeypatch.setattr(watch, "smoothed", lambda found: found)
    monkeypatch.setattr(
        watch, "points", lambda rows, key: [key] if rewards or "r" not in key else []
    )
    view = SimpleNamespace(
        path="a", step=1, total_steps=None, state="", steps=[], evaluations=[], latest_samples=[]
    )
    watch.shown(view, 80)
    titles = [each[0] for each in drawn]
    assert titles == ["reward" if rewards else "loss", "token accuracy"]
    assert {each[-1] for each in drawn} == {80}


@pytest.mark.parametrize(("row", "evaluation", "shown"), [
    ({"loss": 1.23456, "learning_rate": 1e-4, "tokens_per_second": 1234.5}, None,
     "loss 1.2346  lr 1.00e-04  1,234 tok/s"),
    ({"loss": 0.5}, {"step": 1200, "eval_loss": 2.0, "eval_mean_token_accuracy": 0.25},
     "loss 0.5000\nheld-out loss 2.0000  acc 25.0%  after step 1,200"),
    ({"loss": 0.5}, {"step": 3, "eval_loss": 2.0, "eval_reward": 0.75},
     "loss 0.5000\nheld-out reward 0.7500    after step 3"),
    (None, None, ""),
])  # fmt: skip
def test_the_latest_numbers_of_a_run(row, evaluation, shown):
    view = SimpleNamespace(
        steps=[{"loss": 9.0}, row] if row else [],
        evaluations=[{"step": 0}, evaluation] if evaluation else [],
    )
    assert watch._latest(view).plain == shown


def test_samples_of_a_run(monkeypatch):
    monkeypatch.setattr(watch, "_PROMPT_WIDTH", 5)
    monkeypatch.setattr(watch, "_TEXT_WIDTH", 6)
    rows = [
        {"step": 1200, "prompt": "a  long\nprompt", "text": "a\nlong  text"},
        {"step": 1200, "prompt": "b", "text": ""},
    ]
    (text,) = watch._samples(SimpleNamespace(latest_samples=rows))
    assert text.plain == ("\nsamples after step 1,200\n  rompt\n    a long\n  b\n    (empty)")
    assert watch._samples(SimpleNamespace(latest_samples=[])) == []


def test_a_sample_of_tokens_says_how_many_are_left(monkeypatch):
    monkeypatch.setattr(data, "_SHOWN_TOKENS", 4)
    tokenizer = SimpleNamespace(decode=lambda ids, **how: "".join(map(chr, ids)))
    ids = np.array([97, 98, 99, 100])

    def shown(*more, images=()):
        every = np.concatenate([ids, np.array(more, np.int64)])
        labels = np.where(every == 98, every, -100)
        example = SimpleNamespace(input_ids=every, labels=labels, images=images)
        return data.colored(example, tokenizer)

    text = shown()
    assert text.plain == "abcd" and [text.plain[s.start : s.end] for s in text.spans] == [
        "a", "b", "cd",
    ]  # fmt: skip
    assert [s.style == data._TRAINED_ON for s in text.spans] == [False, True, False]
    assert shown(101).plain == "abcd … and 1 more tokens"
    assert shown(101, 101).plain == "abcd … and 2 more tokens"
    run = [101] * (data._RUN + 1)
    monkeypatch.setattr(data, "_SHOWN_TOKENS", 9)
    assert shown(*run[:-1], images=["a"]).plain == "abcd" + "e" * 5 + " … and 3 more tokens"
    assert shown(*run, 102, images=["a"]).plain == f"abcde×{len(run)}f"
    assert "×" not in shown(*run).plain


class Plan(BatchSampler):
    """What is told of a plan of batches, without one."""

    longest, steps_per_epoch, total_steps = 5, 1000, 3000
    batch_size, sides, accumulation = 4, 2, 8
    rows = ()

    def __init__(self, rows, **values):
        self.__class__ = type("Planned", (Plan,), {"rows": [0] * rows, **values})


def statistics(plan, *, packing=False, split=None, num_others=0, held_out=False, images=0):
    counts = SimpleNamespace(rows=1234, truncated=1, dropped=2, without_labels=3, empty=4)
    dataset = object.__new__(type("Split", (Subset,), {
        "counts": counts, "num_tokens": 4000, "num_label_tokens": 1000, "num_rows": 1000,
        "num_others": num_others, "image_sources": {i: i for i in range(images)},
    }))  # fmt: skip
    settings = SimpleNamespace(
        data=SimpleNamespace(eval_split=split, packing=packing, max_seq_length=8)
    )
    files = SimpleNamespace(tokens=SimpleNamespace(count=lambda image: 100 + image))
    prepared = SimpleNamespace(dataset=dataset, plan=plan, images=files)
    return rows_of(data._statistics(settings, prepared, held_out=held_out))


@pytest.mark.parametrize(("how", "held"), [
    ({}, ""), ({"split": 0.1, "num_others": 7}, ", 7 held out"), ({"num_others": 7}, ""),
    ({"split": 0.1, "num_others": 7, "held_out": True}, ""), ({"split": 0.1}, ""),
])  # fmt: skip
def test_numbers_of_a_data_set(monkeypatch, how, held):
    monkeypatch.setattr(data, "source_shares", lambda dataset: ())
    assert statistics(Plan(3), **how) == [
        f"rows 1,234 read, 1,000 used{held}",
        "length 1 truncated; dropped: 2 too long, 3 without labels, 4 empty",
        "tokens 4,000 per epoch, loss on 1,000 (25.0 %), the rest masked",
        "steps 1,000 per epoch, 3,000 in total, of 2 x 8 rows",
    ]


@pytest.mark.parametrize(("plan", "said"), [
    (Plan(1000), "packed into 1,000 rows of 8 tokens, 50.0 % full"),
    (Plan(1000, longest=16), "packed into 1,000 rows of 16 tokens, 25.0 % full"),
    (Plan(1, longest=4000), "packed into 1 row of 4,000 tokens, 100.0 % full"),
])  # fmt: skip
def test_how_full_packed_rows_are(monkeypatch, plan, said):
    monkeypatch.setattr(data, "source_shares", lambda dataset: ())
    assert said in statistics(plan, packing=True)
    assert said not in statistics(plan)


def test_images_and_completions_of_a_data_set(monkeypatch):
    share = SimpleNamespace(name="a", rows=300, of=2000)
    monkeypatch.setattr(data, "source_shares", lambda dataset: [share])
    monkeypatch.setattr(Subset, "__len__", lambda self: 1000)
    shown = statistics(SimpleNamespace(**{
        name: getattr(Plan, name)
        for name in ("steps_per_epoch", "total_steps", "batch_size", "sides", "accumulation")
    }), packing=True, images=3)  # fmt: skip
    assert "images 3, of at most 102 tokens" in shown
    assert "a: 300 of 2,000 (30.0 %)" in shown and shown[-1].endswith("of 2 x 8 completions")
    assert not any("packed" in line for line in shown)


def test_marks_of_a_curve_are_at_the_height_of_their_values(monkeypatch):
    monkeypatch.setattr(watch, "_PLOT_HEIGHT", 5)
    up = SimpleNamespace(share=lambda value: value / 8, ticks=lambda: [0.0, 2.0, 8.0])
    rows = ["ab", f"c{watch.MARK}d", "", watch.MARK, "e"]
    monkeypatch.setattr(watch, "dots", lambda *given: (rows, up))
    (text,) = watch._plot("loss", [], [1], 80)
    title, *lines = text.plain.strip("\n").split("\n")
    assert title == f"loss  {watch.MARK} held-out"
    assert lines == [
        "       8  ab", f"          c{watch.MARK}d", "          ", f"       2  {watch.MARK}",
        "       0  e",
    ]  # fmt: skip
    (text,) = watch._plot("loss", [], [], 80)
    assert text.plain.startswith("\nloss\n")

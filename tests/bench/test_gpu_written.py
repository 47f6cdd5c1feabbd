"""The short end of a measurement's summary, which has to tell what went wrong."""

import json

import pytest

STEP = {"work_seconds": None, "step_seconds": {"median": 0.5}, "flops_per_second": 1e9,
        "tokens_per_second": {"median": 300.0, "min": 200.0, "max": 400.0},
        "memory": {"peak": 500 << 20}, "host_share": 0.1, "seconds": {"compile": 2.0},
        "loss": 12.0, "kernels": None}  # fmt: skip
PEER = {"seconds": [1.0] * 4, "tokens_per_step": 600, "losses": [12.1], "device_mib": 1000,
        "versions": {}}  # fmt: skip
DONE = {"status": "done"}


@pytest.fixture
def folder(tmp_path):
    """A measurement in which nothing failed."""
    about = {"key": "about", "name": "H100", "info": {"adapter_type": "DiscreteGPU"}}
    check = {"key": "own bfloat16 rope 0", "good": True}
    for name, row in {"device-dawn": about, "own-dawn": check}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    names = ("device-dawn", "own-dawn", "bench-1b-64-dawn", "peft-1b-64", "losses-peft",
             "losses-dawn")  # fmt: skip
    files = {"state": dict.fromkeys(names, DONE), "bench-1b-64-dawn": STEP, "peft-1b-64": PEER,
             "losses-peft": {"losses": [12.0, 11.9]}, "losses-dawn": {"losses": [12.01, 11.9]},
             "cards": ["H100"]}  # fmt: skip
    for name, contents in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
    return tmp_path


def short(gpu, folder):
    return gpu.written.in_short(gpu.summary.summary(folder)).splitlines()


def note(folder, name, **part):
    path = folder / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: part}))


def test_it_comes_to_speed_and_memory_beside_peft(gpu, folder):
    lines = short(gpu, folder)
    assert lines[1] == "nothing failed"
    assert "own checks through dawn: 1 of 1 good" in lines
    assert any(line.startswith("bench-1b-64-dawn: 300 tokens/s, 500 MiB") for line in lines)
    assert "ours / PEFT, bench-1b-64-dawn: {'speed': 0.5, 'own_mib': 0.5}" in lines
    assert lines[-1] == "6 parts done; left: none of those begun"


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (None, "no kernel timed"),
        (0.45, "gap 50.0 ms"),
        (0.51, "kernels by themselves take 10.0 ms longer than the step"),
    ],
)
def test_the_gap_between_kernels_is_told_where_there_is_one(gpu, folder, work, told):
    (folder / "bench-1b-64-dawn.json").write_text(json.dumps({**STEP, "work_seconds": work}))
    assert f", {told}, compiled in 2.0 s" in gpu.written.written(gpu.summary.summary(folder))


def test_what_was_timed_at_a_low_clock_is_marked(gpu, folder):
    note(folder, "layers-x-dawn", status="done")
    launch = {"us": 20.0, "label": "add", "path": "add.wgsl", "shapes": {}, "flops": 0, "bytes": 9,
              "matrix_units": False}  # fmt: skip
    rows = [{"key": key, "clock": clock, "launches": [launch]}
            for key, clock in (("default", 0.99), ("tiled", 0.3))]  # fmt: skip
    (folder / "layers-x-dawn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = gpu.written.written(gpu.summary.summary(folder)).splitlines()
    assert "  20: default" in lines and "  20: tiled (AT 30% OF THE CLOCK)" in lines


def test_what_failed_comes_first_and_what_the_call_ended_is_no_failure(gpu, folder):
    note(folder, "layers-x-dawn", status="stopped", why="the call's time was up")
    note(folder, "attention-dawn", status="left out", why="3 s left of 10")
    note(folder, "others-x", status="under way")
    note(folder, "torch", status="failed", why="code 1: torch reaches no card")
    lines = short(gpu, folder)
    assert lines[1] == "FAILED torch: code 1: torch reaches no card (torch.log)"
    assert not lines[2].startswith("FAILED")
    assert lines[-1] == "6 parts done; left: layers-x-dawn, attention-dawn, others-x"


def test_wrong_kernels_and_losses_are_told(gpu, folder):
    (folder / "own-dawn.jsonl").write_text(
        json.dumps({"key": "own bfloat16 rope 0", "good": False, "error": 0.5}) + "\n"
    )
    (folder / "losses-dawn.json").write_text(json.dumps({"losses": [12.0, float("nan")]}))
    (folder / "bench-1b-64-dawn.json").write_text(json.dumps({**STEP, "loss": float("nan")}))
    wrong = [line for line in short(gpu, folder) if line.startswith("WRONG")]
    assert wrong == [
        "WRONG dawn own bfloat16 rope 0: error 5.0e-01",
        "WRONG bench-1b-64-dawn: its loss is nan",
        "WRONG losses-dawn: 0, nan away from PEFT's losses",
    ]


def test_what_failed_within_a_part_that_went_on_is_told(gpu, folder):
    for name in ("layers-x-dawn", "attention-dawn", "others-x-dawn"):
        rows = [{"key": "a", "failed": f"no {name}"}, {"key": "b", "failed": "neither"}]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        note(folder, name, status="done")
    assert [line for line in short(gpu, folder) if line.startswith("FAILED")] == [
        "FAILED in layers-x-dawn: 2, a: no layers-x-dawn",
        "FAILED in others-x-dawn: 2, a: no others-x-dawn",
        "FAILED in attention-dawn: 2, a: no attention-dawn",
    ]


def test_the_best_of_what_was_explored_is_told(gpu, folder):
    rows = [
        {"key": str(i), "shape": "a", "kind": "k", "way": {"n": i}, "wrong": i == 7, "tflops": i}
        for i in range(1, 8)
    ]
    rows += [{"key": "c", "failed": "no memory"}]
    (folder / "explore.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    note(folder, "explore", status="done")
    text = gpu.written.written(gpu.summary.summary(folder))
    shown = text[text.index("== explore") :].splitlines()[1:9]
    assert shown[0] == "a k: 7 ways, 1 wrong" and shown[-1] == "failed, 1 times: no memory"
    assert [float(line.split()[0]) for line in shown[1:-1]] == [6, 5, 4, 3, 2, 1]


def test_a_software_gpu_and_another_card_are_told(gpu, folder):
    about = {"key": "about", "name": "llvmpipe", "info": {"adapter_type": "CPU"}}
    (folder / "device-dawn.jsonl").write_text(json.dumps(about) + "\n")
    (folder / "driver.txt").write_text("as it is: no card\n$ nvidia-smi -L\n")
    (folder / "cards.json").write_text('["H100", "llvmpipe"]')
    lines = short(gpu, folder)
    assert lines[1].startswith("NO CARD") and lines[2] == "  as it is: no card"
    assert "SEVERAL CARDS were measured: H100, llvmpipe" in lines


def test_copies_made_for_a_product_are_told_apart_from_it(gpu, folder):
    """They bear its label, which a table of steps adds up."""
    product = {"label": "gemm/backward", "path": "gemm/nn_tiled.wgsl", "flops": 10**6, "bytes": 9,
               "shapes": {"x": [4, 8], "w": [8, 8]}, "matrix_units": True, "us": 9.0}  # fmt: skip
    copies = [
        {**product, "path": path, "flops": 0, "shapes": {"x": [4, 8]}, "matrix_units": False}
        for path in ("gemm/sizes.wgsl", "gemm/factors.wgsl")
    ]
    variant = {**copies[0], "label": "rope/rotate", "path": "rope/rotate_units.wgsl"}
    row = {"key": "default", "launches": [*copies, product, variant]}
    (folder / "layers-1b-64-dawn.jsonl").write_text(json.dumps(row) + "\n")
    copied = {"key": "head_dim 64", "us": {"attention/forward": 5.0, "attention/factors": 2.0},
              "gflops": {"attention/forward": 100.0}}  # fmt: skip
    (folder / "attention-dawn.jsonl").write_text(json.dumps(copied) + "\n")
    for name in ("layers-1b-64-dawn", "attention-dawn"):
        note(folder, name, status="done")
    figures = gpu.summary.summary(folder)
    assert list(figures["layers"]["layers-1b-64-dawn"]["kernels"]) == [
        "gemm/backward, gemm/sizes (x 4x8)", "gemm/backward, gemm/factors (x 4x8)",
        "gemm/backward (x 4x8, w 8x8)", "rope/rotate (x 4x8)",
    ]  # fmt: skip
    assert "forward 5 us 100 GFLOP/s, factors 2 us" in gpu.written.written(figures)


def test_a_layer_is_told_as_the_default_launches_it(gpu, folder):
    """Kernels of a variant that is slow come first by their times, and tell nothing."""
    launch = {"path": "gemm/nt.wgsl", "flops": 10**6, "bytes": 9, "shapes": {"x": [4, 8]},
              "matrix_units": False}  # fmt: skip
    rows = [
        {"key": key, "launches": [{**launch, "label": label, "us": us} for label, us in own]}
        for key, own in (
            ("default", [("gemm/forward", 3.0), ("lora/down", 5.0), ("tensor/fill", 0.0)]),
            ("tiled", [("gemm/forward", 2.0), ("lora/down", 0.0), ("tensor/sum_parts", 900.0)]),
        )
    ]
    path = folder / "layers-1b-64-dawn.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    note(folder, "layers-1b-64-dawn", status="done")
    text = gpu.written.written(gpu.summary.summary(folder))
    assert text.index("lora/down (x 4x8): 5 us") < text.index("gemm/forward (x 4x8): 3 us, best 2")
    assert "sum_parts" not in text and "902: tiled" in text
    # What took no longer than a launch of nothing has no rate.
    assert "lora/down (x 4x8): 5 us, best 5 (default), 200 GFLOP/s" in text
    assert "tensor/fill (x 4x8): 0 us, best 0 (default), 0 GFLOP/s" in text


def test_why_matrix_units_are_not_used_is_told(gpu, folder):
    about = {"key": "about", "name": "H100", "info": {"adapter_type": "DiscreteGPU"},
             "notes": ["the matrix units of H100 are not used: wrong"]}  # fmt: skip
    (folder / "device-dawn.jsonl").write_text(json.dumps(about) + "\n")
    assert "  the matrix units of H100 are not used: wrong" in short(gpu, folder)

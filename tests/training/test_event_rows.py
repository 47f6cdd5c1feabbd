"""Every event of a run as a row of JSON."""

import json
from collections import Counter
from pathlib import Path

from qlora_wgpu.training import RunSetup, Sample
from qlora_wgpu.training.observers import EVENTS, EventRows, SourceShare, WorkerMetrics, Written

SETUP = RunSetup(
    device="a GPU", base="model", scheme="nf4", compute_dtype="bfloat16", rank=4, adapted_layers=2,
    adapter_parameters=64, batch_size=1, accumulation=1, train_rows=3, train_tokens=9,
    sources=(SourceShare("one", 3, 3, 9),),
)  # fmt: skip
TOLD = {
    "note": (("a note",), {"text": "a note"}),
    "warning": (("of hf_abcdefghijklmnopqrstuvwxyz0123456789",), {"text": "of ***"}),
    "activity": (("",), {"text": ""}),
    "planned": ((Counter(weights=2),), {"memory": {"weights": 2}}),
    "planned_on_host": ((Counter(heap=1), 5), {"memory": {"heap": 1}, "mapped": 5}),
    "tuned": ((["so"],), {"notes": ["so"]}),
    "loading": (("lm_head", 1, 2), {"name": "lm_head", "done": 1, "total": 2}),
    "setup": ((SETUP,), {"device": "a GPU", "rank": 4}),
    "started": ((8, 0, Counter(weights=2)), {"total_steps": 8, "done": 0}),
    "resumed": ((Path("run/checkpoints/2"), 2), {"checkpoint": "run/checkpoints/2", "step": 2}),
    "workers": (([WorkerMetrics("0", 4, 4, 1.0)],), {}),
    "step": (({"step": 1, "loss": 2.0},), {"step": 1, "loss": 2.0}),
    "evaluation": (({"step": 1, "eval_loss": 2.0},), {"step": 1, "eval_loss": 2.0}),
    "written": ((1, [Written("a", "b", "c")]), {"step": 1}),
    "saved": ((Path("run/adapter"),), {"folder": "run/adapter"}),
    "sampled": ((Sample("a", "b", "c"),), {"prompt": "a", "after": ""}),
    "reported": (((Path("run/report.html"),),), {"paths": ["run/report.html"]}),
}


def test_every_event_is_a_row_with_what_it_tells_by_name() -> None:
    assert {*TOLD, "finished"} == set(EVENTS)  # the result has a row of its own
    rows = []
    watcher = EventRows(lambda row: rows.append(json.loads(json.dumps(row))))
    for event, (details, expected) in TOLD.items():
        getattr(watcher, event)(*details)
        assert rows[-1]["event"] == event
        assert expected.items() <= rows[-1].items()
    assert len(rows) == len(TOLD)
    by_event = {row["event"]: row for row in rows}
    assert by_event["setup"]["sources"] == [{"name": "one", "rows": 3, "of": 3, "tokens": 9}]
    assert by_event["written"]["texts"] == [{"prompt": "a", "expected": "b", "text": "c"}]
    assert by_event["workers"]["workers"][0]["tokens"] == 4

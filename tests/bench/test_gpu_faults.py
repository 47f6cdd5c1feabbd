"""What a card and its driver may do to a measurement: hang, crash, take the machine along."""

import json
import tarfile

from bench.parts import BENCHMARKS, python, session, state

HUNG = """
from gpu_rows import Rows
from pathlib import Path
def stuck(): time.sleep(60)
rows = Rows(Path(sys.argv[1] + '.jsonl'))
rows.measure('hung', stuck)
rows.measure('b', lambda: {'value': 2})
"""


def test_a_row_that_hangs_costs_little_and_its_stack_is_told(gpu, tmp_path):
    code = f"sys.path.insert(0, {str(BENCHMARKS)!r}); exec({HUNG!r})"
    part = gpu.Part("rows", python(code), rows=True, environment={gpu.SECONDS: "0.5"})
    session(gpu, tmp_path).run([part])
    rows = {row["key"]: row for row in gpu.read_rows(tmp_path / "all" / "rows.jsonl")}
    assert state(tmp_path / "all") == {"rows": "done"} and rows["b"]["value"] == 2
    assert rows["hung"]["failed"] == "did not end, 2 times: it crashed or hung, as its log tells"
    assert "in stuck" in (tmp_path / "all" / "rows.log").read_text()


def test_a_part_that_takes_the_machine_along_twice_comes_last(gpu, tmp_path):
    """Else each new machine would be lost to it, too."""
    parts = [gpu.Part("worst", python("pass")), gpu.Part("good", python("pass"))]
    folder = tmp_path / "all"
    folder.mkdir()
    known = {"worst": {"status": "under way"}}
    for lost in (1, 2):
        (folder / "state.json").write_text(json.dumps(known))
        taken = session(gpu, tmp_path)
        known["worst"] = {**taken.state["worst"], "status": "under way"}
        assert taken.state["worst"]["lost"] == lost
        assert taken.state["worst"]["attempts"] == (lost == 2)
    taken.run(parts, failed=False)
    assert state(folder) == {"worst": "stopped", "good": "done"}
    taken.run(parts)
    assert state(folder) == {"worst": "done", "good": "done"}


def test_what_a_process_left_as_crashing_is_of_its_session(gpu, tmp_path):
    """A session that is ended ends processes in the middle of trying a driver."""
    own = tmp_path / "all" / "cache" / "qlora-wgpu"
    for name in ("attempts", "checks"):
        (own / name).mkdir(parents=True)
        (own / name / "x").write_text("1\n2\n")
    first = session(gpu, tmp_path)
    assert not (own / "attempts").exists() and (own / "checks" / "x").exists()
    (own / "attempts").mkdir()
    first.pack()
    with tarfile.open(tmp_path / "all.tar.gz") as packed:
        names = packed.getnames()
    assert "cache/qlora-wgpu/checks/x" in names and not any("attempts" in name for name in names)


def test_a_crash_is_told_by_its_signal_and_its_last_words_first(gpu, tmp_path):
    code = "print('first'); print('it was lost', flush=True); os.abort()"
    session(gpu, tmp_path).run([gpu.Part("bad", python(code))])
    part = json.loads((tmp_path / "all" / "state.json").read_text())["bad"]
    assert part["why"].startswith("SIGABRT: it was lost | first")
    session(gpu, tmp_path).run([gpu.Part("slow", python("time.sleep(9)"), seconds=0.5)])
    part = json.loads((tmp_path / "all" / "state.json").read_text())["slow"]
    assert part["why"].startswith("it took more than 0 s: SIGTERM: stopped")

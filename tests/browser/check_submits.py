"""Submits hold no more work than systems let pass; figures are printed (pytest -s)."""

import pytest
from browser.python_steps import as_json, examples

LIMIT = 0.1  # seconds of a submit, as page/pace.mjs has it
STEPS = 4  # the first two are measured


@pytest.mark.parametrize("browser", ["firefox", "chromium"])
def test_a_step_is_submitted_in_pieces(browser, ask):
    rows = as_json(examples(200, 40, 60))
    task = {"rank": 16, "steps": STEPS, "examples": rows, "timed": True}
    cut = ask(browser, "shape.html", task)[0]["cut"]
    print(
        f"\n{browser}: {sum(n for n, _, _ in cut)} launches in {len(cut)} submits; the longest by "
        f"measured times {1e3 * max(whole for _, whole, _ in cut):.0f} ms, the longest launch "
        f"{1e3 * max(most for _, _, most in cut):.0f} ms, all {sum(w for _, w, _ in cut):.2f} s"
    )
    assert len(cut) > 2
    for count, whole, most in cut:
        assert count == 1 or whole <= LIMIT
        assert most <= whole
    # None is cut finer than it has to be: a launch more would be too much.
    assert sum(whole for _, whole, _ in cut) > LIMIT * (len(cut) - 1) / 2

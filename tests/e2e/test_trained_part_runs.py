"""Runs that train more than layers' pairs: as planned, and with the same bits however computed."""

import pytest
from support.packed_runs import Plans, packed_run

from e2e.tiny import VOCAB, write_chats, write_model

pytestmark = pytest.mark.cover(runs=["a pair on the head", "rows of the embedding"])

LORAS = {
    "a pair on the head": {"target_modules": ["q_proj", "lm_head"]},
    "a pair on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "rows of the embedding": {"trainable_token_indices": [VOCAB - 1, 0, 5, 3]},
    "a whole matrix": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("parts")
    write_model(path / "model")  # tied
    write_chats(path / "chats.jsonl", rows=16)
    return path


@pytest.fixture(scope="module", params=LORAS)
def runs(request, place):
    """Trains as a whole, and gives what trains otherwise, the result, the bits and the plans."""

    def run(name, **more):
        return packed_run(place, f"{name} {request.param}", LORAS[request.param], **more)

    plans = Plans()
    return run, *run("whole", observer=plans), plans


def test_the_plan_is_what_a_run_takes(runs):
    _, result, _, plans = runs
    assert abs(plans.planned_bytes[0] - result.peak_bytes) < 0.01 * result.peak_bytes


def test_the_same_bits_resumed(runs):
    run, _, whole, _ = runs
    run("resumed", steps=2)
    assert run("resumed", resume=True)[1] == whole


def test_the_same_bits_with_layers_kept(runs):
    run, _, whole, _ = runs
    assert run("kept", train={"gradient_checkpointing": False})[1] == whole

"""Conversations of every shape, in all templates that can be had: the recorded texts and masks.

``python tests/references/chat_masks.py`` compares them with transformers' and TRL's, and records.
"""

from __future__ import annotations

import json

import pytest
from references.chat_masks import OTHERS, RECORD, SPECIAL, digest, ours
from references.conversations import CONVERSATIONS
from support.recorded import needs_recordings

from qlora_wgpu.data import ChatTemplate
from qlora_wgpu.data.chat_template import BUILT_IN_TEMPLATES

RECORDED = json.loads(RECORD.read_text())
OWN = [name for name in RECORDED if name.startswith("own/")]


def given_by(source):
    template = ChatTemplate(source, SPECIAL)
    return {name: digest(*ours(template, name)) for name in CONVERSATIONS}


@pytest.mark.parametrize("name", OWN)
def test_own_templates_write_and_learn_what_is_recorded(name):
    assert given_by(BUILT_IN_TEMPLATES[name.removeprefix("own/")]) == RECORDED[name]


@pytest.mark.slow
@needs_recordings
@pytest.mark.parametrize("name", [name for name in RECORDED if name not in OWN])
def test_templates_of_models_write_and_learn_what_is_recorded(name):
    assert given_by((OTHERS / f"{name}.jinja").read_text()) == RECORDED[name]

"""A format of rows has several places (CONTRIBUTING.md): each of them knows all formats."""

import re
from typing import get_args

from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.config import DataConfig
from qlora_wgpu.config.values import RowFormat
from qlora_wgpu.data.columns import _USUAL_NAMES, CHAT_PAIR, CHATS, FORMATS
from qlora_wgpu.data.conversations import USUAL_ROLES
from qlora_wgpu.data.row_formats import RowEncoder
from qlora_wgpu.web.site import page_folder


def test_the_setting_names_every_format():
    named = get_args(get_args(RowFormat)[0])
    assert set(named) == {"auto", *FORMATS}
    described = DataConfig.model_fields["format"].description
    assert all(name in described for name in FORMATS)


def test_every_format_is_written():
    assert set(RowEncoder(tiny_tokenizer(), None).writers) == {CHAT_PAIR, *FORMATS}
    assert set(CHATS) < {CHAT_PAIR, *FORMATS}


def test_the_page_knows_the_same_formats_by_the_same_keys():
    source = (page_folder() / "conversations.mjs").read_text(encoding="utf-8")
    listed = re.search(r"export const FORMATS = \{(.*?)\n\};", source, re.DOTALL)[1]
    lines = re.findall(r"^  '?([\w/]+)'?: \[(.*?)\],$", listed, re.MULTILINE)
    page = [(name, tuple(re.findall(r"'(\w+)'", keys))) for name, keys in lines]
    assert page == list(FORMATS.items())  # in order of precedence


def test_the_page_knows_the_same_names_of_columns():
    source = (page_folder() / "conversations.mjs").read_text(encoding="utf-8")
    listed = re.search(r"const USUAL_NAMES = \{(.*?)\n\};", source, re.DOTALL)[1]
    assert dict(re.findall(r"^  (\w+): '([\w ]+)',$", listed, re.MULTILINE)) == _USUAL_NAMES


def test_the_page_knows_the_same_roles():
    source = (page_folder() / "conversations.mjs").read_text(encoding="utf-8")
    listed = re.search(r"const USUAL_ROLES = \[(.*?)\];", source)[1]
    assert set(re.findall(r"'(\w+)'", listed)) == USUAL_ROLES


def test_the_page_shows_a_row_of_every_format():
    source = (page_folder() / "kinds.mjs").read_text(encoding="utf-8")
    listed = re.search(r"const ROWS = \{(.*?)\n\};", source, re.DOTALL)[1]
    rows = dict(re.findall(r"^  '?([\w/]+)'?: \{(.*)\},$", listed, re.MULTILINE))
    assert list(rows) == list(FORMATS)
    for name, keys in FORMATS.items():
        assert set(keys) <= set(re.findall(r"(\w+): ", rows[name]))

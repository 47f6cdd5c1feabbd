"""An adapter on the hub: what is sent, to whom, and what the card says."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import numpy as np
import pytest
import yaml
from huggingface_hub import constants

from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.lora import AdapterConfig, save_adapter
from qlora_wgpu.runs.pushing import push, write_card

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


class Hub(BaseHTTPRequestHandler):
    """Takes a commit as the hub does, small files within it."""

    requests: list
    files: dict
    created: list
    refuses: bool

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.path, self.headers.get("Authorization")))
        if self.refuses:
            return self.send(403, {"error": "no right to write there"})
        if self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for f in asked]  # fmt: skip
            return self.send(200, {"files": modes})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[line["value"]["path"]] = content
            return self.send(
                200,
                {
                    "commitOid": "0" * 40,
                    "commitUrl": f"{constants.ENDPOINT}/me/mine/commit/0",
                    "success": True,
                },
            )
        if self.path.endswith("/create"):
            self.created.append(json.loads(body))
        page = f"http://{self.headers['Host']}/me/mine"
        return self.send(200, {"url": page, "name": "me/mine", "id": "1"})

    def do_GET(self):
        self.requests.append((self.path, self.headers.get("Authorization")))
        self.send(200, {"id": "me/mine", "sha": "0" * 40, "siblings": [], "private": False})

    def send(self, status, answer):
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch):
    handler = type(
        "Handler", (Hub,), {"requests": [], "files": {}, "created": [], "refuses": False}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield handler
    server.shutdown()
    server.server_close()


def adapter(folder, base="owner/base"):
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    tensors = {f"{at}A.weight": np.ones((2, 4), np.float32)}
    tensors[f"{at}B.weight"] = np.ones((4, 2), np.float32)
    save_adapter(folder, tensors, AdapterConfig(2, 8, 0.0, ["q_proj"], False, base))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "private-notes.txt").write_text("not to be sent")
    return folder


def head(card):
    return yaml.safe_load(card.split("---")[1])


def test_what_is_sent(tmp_path, hub):
    page = push(str(adapter(tmp_path / "adapter")), "me/mine")
    assert page.endswith("/me/mine")
    assert set(hub.files) == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    }  # fmt: skip
    card = hub.files["README.md"].decode()
    assert card == (tmp_path / "adapter" / "README.md").read_text()
    assert head(card)["base_model"] == "owner/base" and head(card)["library_name"] == "peft"
    assert "license" not in head(card) and "# license" in card
    assert "rank 2, alpha 8" in card and "me/mine" in card
    # Some versions of the client have the card checked without saying who asks.
    assert {token for _, token in hub.requests} <= {f"Bearer {TOKEN}", None}
    written = [token for path, token in hub.requests if path.endswith(("/create", "/commit/main"))]
    assert written == 2 * [f"Bearer {TOKEN}"]


@pytest.mark.parametrize("private", [False, True])
def test_who_sees_a_new_repository(tmp_path, hub, private):
    """Without a wish the owner's default decides: an organization may keep what is new private."""
    push(str(adapter(tmp_path / "adapter")), "me/mine", private=private)
    [asked] = hub.created
    seen = {key: asked[key] for key in ("private", "visibility") if asked.get(key) is not None}
    assert seen in ([{"private": True}, {"visibility": "private"}] if private else [{}])


def test_a_folder_of_the_user_is_not_told(tmp_path, hub):
    place = adapter(tmp_path / "adapter", base=str(tmp_path / "base"))
    push(str(place), "me/mine")
    sent = b"".join(hub.files.values())
    assert str(tmp_path).encode() not in sent and b"base_model: " not in sent
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] is None
    (place / "README.md").unlink()
    push(str(place), "me/mine", base="owner/base")
    assert head(hub.files["README.md"].decode())["base_model"] == "owner/base"
    sent = json.loads(hub.files["adapter_config.json"])
    assert sent["base_model_name_or_path"] == "owner/base" and sent["r"] == 2
    stored = json.loads((place / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_card_that_is_there_is_the_user_s(tmp_path, hub):
    place = adapter(tmp_path / "adapter")
    (place / "README.md").write_text("mine")
    assert write_card(place, "me/mine", None).read_text() == "mine"
    push(str(place), "me/mine")
    assert hub.files["README.md"] == b"mine"


def test_what_the_hub_refuses_is_one_sentence(tmp_path, hub):
    hub.refuses = True
    with pytest.raises(CheckpointError, match="me/mine cannot be written on the hub") as told:
        push(str(adapter(tmp_path / "adapter")), "me/mine")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        (("HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE is set, so nothing is sent"),
        (("ENDPOINT", "http://hub.example"), "in the clear: use https"),
    ],
)
def test_from_where_nothing_is_sent(tmp_path, hub, monkeypatch, setting, what):
    monkeypatch.setattr(constants, *setting)
    with pytest.raises(ConfigError, match=what):
        push(str(adapter(tmp_path / "adapter")), "me/mine")
    assert not hub.requests and not (tmp_path / "adapter" / "README.md").exists()


def test_nobody_is_logged_in(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="hf auth login"):
        push(str(adapter(tmp_path / "adapter")), "me/mine")


@pytest.mark.parametrize("name", ["mine", "me/mine/too", "../x/y"])
def test_a_name_that_is_none(tmp_path, hub, name):
    with pytest.raises(ConfigError, match="would be owner/name"):
        push(str(tmp_path), name)

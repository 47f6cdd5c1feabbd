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
from support.commands import run_here

from qlora_wgpu.errors import CheckpointError, ConfigError
from qlora_wgpu.lora import AdapterConfig, save_adapter
from qlora_wgpu.runs import hub_upload
from qlora_wgpu.runs.hub_upload import push

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
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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


@pytest.mark.slow
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


@pytest.mark.parametrize("private", [None, False, True])
def test_who_sees_a_new_repository(tmp_path, hub, private):
    """Its owner alone, unless everybody is to."""
    push(str(adapter(tmp_path / "adapter")), "me/mine",
         **({} if private is None else {"private": private}))  # fmt: skip
    [asked] = hub.created
    seen = {key: asked[key] for key in ("private", "visibility") if asked.get(key) is not None}
    if private is False:
        assert seen in ({"private": False}, {"visibility": "public"})
    else:
        assert seen in ({"private": True}, {"visibility": "private"})


def test_nothing_leaves_before_somebody_agrees(tmp_path, hub):
    asked = []

    def agree(parcel):
        asked.append((sorted(parcel.files), parcel.nbytes, parcel.private))
        return False

    assert push(str(adapter(tmp_path / "adapter")), "me/mine", agree=agree) is None
    [(files, size, private)] = asked
    assert "adapter_model.safetensors" in files and size > 200 and private
    assert not hub.requests


def test_a_folder_that_cannot_be_written(tmp_path, hub, monkeypatch):
    """The card is uploaded although it cannot be written next to the adapter."""

    def refuse(path, content):
        raise CheckpointError(f"{path} cannot be written: Read-only file system")

    monkeypatch.setattr(hub_upload, "write_file", refuse)
    push(str(adapter(tmp_path / "adapter")), "me/mine")
    assert b'base_model: "owner/base"' in hub.files["README.md"]
    assert not (tmp_path / "adapter/README.md").exists()


def run_of(place, **data):
    """A run's folder with what a card tells of it."""
    adapter(place / "adapter")
    train = data.get("train", str(place / "secret/train.jsonl"))
    (place / "config.yaml").write_text(
        f"model: {{path: owner/base}}\ndata: {{train: {train}}}\noutput: {{dir: {place}}}\n"
    )
    rows = [{"step": 0, "eval_loss": 3.0}, {"step": 5, "loss": 2.0, "num_tokens": 1234},
            {"step": 5, "eval_loss": 1.5}]  # fmt: skip
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "loss.png").write_bytes(b"a picture")
    return place


def test_a_card_tells_of_the_run(tmp_path, hub):
    push(str(run_of(tmp_path / "run", train="owner/chats") / "adapter"), "me/mine")
    card = hub.files["README.md"].decode()
    assert "| trained | 5 steps, 1,234 tokens |" in card and "| data | owner/chats |" in card
    assert "3.0000 before, 1.5000 after" in card and "](loss.png)" in card
    assert hub.files["loss.png"] == b"a picture"


def test_data_of_the_user_is_not_told(tmp_path, hub):
    push(str(run_of(tmp_path / "run") / "adapter"), "me/mine")
    assert str(tmp_path).encode() not in hub.files["README.md"]
    assert b"secret" not in hub.files["README.md"]


def test_from_the_command_line(tmp_path, hub):
    run_of(tmp_path / "run")
    refused = run_here("push", "run", "me/mine", cwd=tmp_path)
    assert refused.returncode == 2 and "add --yes to upload" in refused.stderr
    assert "adapter_model.safetensors" in refused.stdout and not hub.requests
    sent = run_here("push", "run", "me/mine", "--public", "--yes", cwd=tmp_path)
    assert sent.returncode == 0, sent.stderr
    assert "(public if it is new)" in sent.stdout and "uploaded to http" in sent.stdout
    both = run_here("push", "run", "me/mine", "--gguf", "a", "--merged", "b", cwd=tmp_path)
    assert both.returncode == 2 and "mutually exclusive" in both.stderr


def test_a_gguf_file(tmp_path, hub):
    run = run_of(tmp_path / "run")
    (run / "model.gguf").write_bytes(b"GGUF")
    (run / "model.Modelfile").write_text("FROM ./model.gguf")
    push(str(run / "adapter"), "me/mine", gguf=str(run / "model.gguf"))
    assert set(hub.files) == {"README.md", "loss.png", "model.gguf", "Modelfile"}
    card = hub.files["README.md"].decode()
    assert head(card)["library_name"] == "gguf" and "--hf-file model.gguf" in card
    assert head(card)["base_model_relation"] == "finetune"
    assert not (run / "adapter/README.md").exists()
    with pytest.raises(CheckpointError, match=r"gone.gguf is not a GGUF file"):
        push(str(run / "adapter"), "me/mine", gguf=str(run / "gone.gguf"))


def test_a_merged_model(tmp_path, hub):
    run = run_of(tmp_path / "run")
    merged = run / "merged"
    (merged / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.doc", ".hidden.json",
                 "additional_chat_templates/tools.jinja"):  # fmt: skip
        (merged / name).write_text("{}")
    (merged / "README.md").write_text("the base's own")
    push(str(run / "adapter"), "me/mine", merged=str(merged))
    assert set(hub.files) == {
        "README.md", "loss.png", "config.json", "model.safetensors", "tokenizer.json",
        "additional_chat_templates/tools.jinja",
    }  # fmt: skip
    card = hub.files["README.md"].decode()
    assert head(card)["library_name"] == "transformers" and "PeftModel" not in card
    with pytest.raises(CheckpointError, match=r"has no config.json, so it is not a merged model"):
        push(str(run / "adapter"), "me/mine", merged=str(run))


def test_a_revision_of_the_base_stands_where_peft_has_it(tmp_path, hub):
    push(str(adapter(tmp_path / "adapter", base="owner/base@v1")), "me/mine")
    sent = json.loads(hub.files["adapter_config.json"])
    assert (sent["base_model_name_or_path"], sent["revision"]) == ("owner/base", "v1")
    assert head(hub.files["README.md"].decode())["base_model"] == "owner/base"


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
    push(str(place), "me/mine")
    assert hub.files["README.md"] == b"mine"


def test_what_the_hub_refuses_is_one_sentence(tmp_path, hub):
    hub.refuses = True
    with pytest.raises(CheckpointError, match="cannot upload to me/mine") as told:
        push(str(adapter(tmp_path / "adapter")), "me/mine")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        (("HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE is set, so nothing can be uploaded"),
        (("ENDPOINT", "http://hub.example"), "unencrypted: use https"),
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
    with pytest.raises(ConfigError, match="expected owner/name"):
        push(str(tmp_path), name)

"""Checks of a hub model before the start, against a local hub server."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from asyncrl.chat.hub import NAME
from tests.chat.markers import save

COMMIT = "0" * 40
ASKS = """
import sys
from asyncrl.chat.hub import described_in
from asyncrl.chat.names import candidates
from asyncrl.errors import ConfigError
try:
    folder = described_in(sys.argv[1])
    print(sorted(file.name for file in folder.iterdir()) if folder else None, candidates(sys.argv[1]))
except ConfigError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that has `me/model`, keeps `me/gated` for those who log in, and nothing else."""
    folder = tmp_path / "served"
    save(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "model.safetensors").write_bytes(bytes(1000))

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/me/model/tree/"):
                files = [(file.name, file.stat().st_size) for file in folder.iterdir()]
                tree = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files]
                self.say(200, json.dumps(tree).encode())
            elif path.startswith("/api/models/me/model"):
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                self.say(200, json.dumps({"id": "me/model", "sha": COMMIT, "siblings": files}).encode())
            elif path.startswith("/api/models/me/gone/tree/"):
                self.say(200, json.dumps([{"type": "file", "path": "a.json", "size": 9, "oid": "0" * 40}]).encode())
            elif path.startswith("/api/models/me/gone"):
                self.say(200, json.dumps({"id": "me/gone", "sha": COMMIT, "siblings": []}).encode())
            elif "me/gone" in path:  # it hangs up in the middle of a file
                self.close_connection = True
            elif path.startswith(f"/me/model/resolve/{COMMIT}/"):
                self.say(200, (folder / path.rpartition("/")[2]).read_bytes())
            elif "me/gated" in path:
                self.say(403, b"", "GatedRepo")
            else:
                self.say(404, b"", "RepoNotFound")

        def say(self, status: int, body: bytes, error: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def asked(name: str, endpoint: str, home: Path, offline: str = "0") -> str:
    """What a process says that looks `name` up; its library reads these variables once, as it is imported."""
    given = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", ASKS, name]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_all_but_the_weights_is_fetched_and_kept_for_when_there_is_no_network(hub: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    said = asked("me/model", hub, home)
    assert "config.json" in said and "tokenizer.json" in said and "safetensors" not in said
    assert "'qwen3'" in said  # the renderers of its family
    assert asked("me/model", hub, home, offline="1") == said


def test_a_name_that_is_none_and_one_that_needs_a_login_are_refused_and_a_hub_out_of_reach_says_nothing(
    hub: str, tmp_path: Path
) -> None:
    assert "no such model on the Hugging Face hub" in asked("me/modle", hub, tmp_path)
    assert "hf auth login" in asked("me/gated", hub, tmp_path)
    assert asked("me/model", hub, tmp_path, offline="1").startswith("None")
    assert asked("me/gone", hub, tmp_path).startswith("None")


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "me/a_b.c"])
def test_names_of_the_hub(name: str) -> None:
    assert NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", "a/b/c", "my model", "/abs", "./here", "a/", "-a/b", "a--b", "a..b", "né/b"])
def test_what_is_no_name_of_the_hub(name: str) -> None:
    assert not NAME.fullmatch(name)

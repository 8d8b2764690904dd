"""A server without a model that has the endpoints of `vllm serve` 0.32 that the engine uses and answers as a real one
did; its tokens are fixed. `tests/vllm/test_servers.py` shows what a real server does with weights."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from asyncrl.cli.processes.ports import free_port
from asyncrl.engines.vllm.names import PROTOCOL
from asyncrl.engines.vllm.receiver import SEAT
from tests.engines.server.test_terms import SETTINGS

PROCESSES = SETTINGS["parallel_config"]["tensor_parallel_size"]
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
"""


class ContractServer:
    """Answers on a port of its own until `stop`. `start` takes the same port again, as a restarted process would."""

    def __init__(self, shape: dict[str, Any], port: int = 0) -> None:
        self.shape, self.port = shape, port or free_port()
        self.instead: dict[str, Any] = {}
        """Path -> answer to give in place of the correct one."""
        self.hangs = ""
        """Path that is not answered until `stop`."""
        self.running, self.waiting = 0, 0
        """Numbers of running and waiting requests, of all clients, that /metrics reports."""
        self.wanted: list[Any] = []
        """Answer of each of its processes to `asyncrl_wanted`."""
        self.rpc_status = 200
        """Status of calls to its processes: 404 without the developer mode."""
        self.refuses = False
        """Refuse to generate, as a server that was started with another key."""
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.label, self.paused, self.loads = "default", False, 0
        self.held = threading.Event()
        """While set, sequences wait after their first token."""
        self.begun: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []
        self.connections: set[socket.socket] = set()
        handler = type("Handler", (self.handler(),), {"contract": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self._http.daemon_threads, self._http.block_on_close = True, False
        self.gone = False
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handler(self) -> type[Handler]:
        return Handler

    def end(self) -> None:
        """Clean up after a test, whatever state it left the server in."""
        self.held.clear()
        if not self.gone:
            self.stop()

    def stop(self) -> None:
        """Stop as if killed: connections break."""
        self.gone = True
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    contract: ContractServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for the ack of the first

    def setup(self) -> None:
        super().setup()
        self.contract.connections.add(self.connection)

    def finish(self) -> None:
        self.contract.connections.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        contract = self.contract
        self._hang()
        if self.path == "/metrics":
            return self.say_text(METRICS.format(running=contract.running, waiting=contract.waiting))
        answers = {
            "/server_info": {"vllm_config": SETTINGS},
            "/version": {"version": "0.32.0"},
            "/weight_info": {"weight_version": contract.label},
            **contract.instead,
        }
        self.say(answers[self.path.partition("?")[0]])

    def say_text(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _hang(self) -> None:
        while self.path.partition("?")[0] == self.contract.hangs and not self.contract.gone:
            time.sleep(0.005)

    def do_POST(self) -> None:
        contract = self.contract
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        if path == "/inference/v1/generate":
            if contract.refuses or not body:
                return self.say({"error": "no"}, 401 if contract.refuses else 422)
            return self._generate(body)
        if path in ("/pause", "/resume"):
            contract.paused = path == "/pause"
        if path == "/update_weight_version":
            contract.label = body["new_version"]
        answers = {"asyncrl_model": contract.shape | {"protocol": PROTOCOL, "seat": SEAT}, "asyncrl_load": ""}
        answers |= {"asyncrl_wanted": contract.wanted, "asyncrl_leave": ""}
        answers |= {"init_weight_transfer_engine": None, "asyncrl_poll": [True, [], ""]}
        if path == "/collective_rpc":
            if contract.rpc_status != 200:
                return self.say({"error": "no"}, contract.rpc_status)
            contract.loads += body["method"] == "asyncrl_load"
            return self.say({"results": [answers[body["method"]]] * PROCESSES})
        return self.say({})

    def _generate(self, body: dict[str, Any]) -> None:
        contract = self.contract
        contract.begun.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        label = contract.label
        with suppress(OSError):
            self._chunk(_tokens(7))
            while contract.held.is_set() and not contract.gone:
                time.sleep(0.005)
            if contract.gone:
                self.close_connection = True
                return
            spans = [{"version": label, "start": 0, "end": 1}, {"version": contract.label, "start": 1, "end": 3}]
            self._chunk(_tokens(8, 9, reason="length", spans=spans))
            contract.ended.append(body)  # before the client can see the end
            self.line("[DONE]")
            self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, chunk: dict[str, Any]) -> None:
        self.line(json.dumps(chunk))

    def line(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def say(self, answer: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _tokens(*ids: int, reason: str | None = None, spans: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5, "top_logprobs": []} for token in ids]
    choice = {"token_ids": list(ids), "finish_reason": reason, "weight_versions": spans}
    return {"choices": [choice | {"index": 0, "logprobs": {"content": content}}]}

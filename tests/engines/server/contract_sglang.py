"""A server without a model that has the endpoints of SGLang's that the engine uses, following its sources and the
answers of 0.5.23. Weights are read and kept; they do not affect its answers."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from asyncrl.cli.processes.ports import free_port
from tests.engines.server.contract import ContractServer, Handler

SETTINGS: dict[str, Any] = {
    "dtype": "auto", "tp_size": 1, "dp_size": 1, "pp_size": 1, "tokenizer_worker_num": 1, "quantization": None,
    "speculative_algorithm": None, "enable_lora": None, "preferred_sampling_params": None, "max_req_input_len": 64,
}  # fmt: skip


class SglangContract(ContractServer):
    def __init__(self, architectures: list[str], port: int = 0) -> None:
        self.blind = False
        """The server does not see the folder that it has to load."""
        self.turns_at = ""
        """Version label from the second chunk on; empty: that of the first chunk."""
        self.early = ""
        """Version label of the next sequence alone: weights came after it was sent and before it began."""
        self.always_early = False
        """Use `early` for all sequences."""
        self.poison: list[int] = []
        """Prompt that is answered with status 500."""
        super().__init__({"architectures": architectures}, port)

    def handler(self) -> type[Handler]:
        return SglangHandler

    def start(self) -> None:
        self.seed, self.flushed, self.weights = free_port(), 0, dict[str, torch.Tensor]()
        """`seed` is new at each start."""
        self.in_use = 0
        """Number of times that a flush is still refused, because ended sequences are in the scheduler's last batch."""
        super().start()


class SglangHandler(Handler):
    contract: SglangContract

    def do_GET(self) -> None:
        contract = self.contract
        if self.path not in ("/server_info", "/model_info"):
            return self.say({"detail": "Not Found"}, 404)
        answers = {
            "/server_info": SETTINGS | {"random_seed": contract.seed},
            "/model_info": {"weight_version": contract.label} | contract.shape,
            **contract.instead,
        }
        self.say(answers[self.path])

    def do_POST(self) -> None:
        contract = self.contract
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        match self.path:
            case "/generate" if "input_ids" not in body:
                return self.say({"error": {"message": "no input"}}, 400)
            case "/generate" if body["input_ids"] == contract.poison:
                return self.say({"error": {"message": "it went wrong inside"}}, 500)
            case "/generate" if len(body["input_ids"]) >= SETTINGS["max_req_input_len"]:
                return self.say({"error": {"message": "the input is longer than the maximum allowed length"}}, 400)
            case "/generate" if body.get("stream"):
                return self._generate(body)
            case "/generate":
                said = [-0.1 * place for place in range(len(body["input_ids"]))]
                scores = [[each if place else None, body["input_ids"][place], None] for place, each in enumerate(said)]
                return self.say({"meta_info": {"input_token_logprobs": scores}})
            case "/pause_generation":
                contract.paused = body["mode"] == "abort"
            case "/continue_generation":
                contract.paused = False
            case "/update_weights_from_disk" if contract.blind or not contract.paused or body.get("flush_cache", True):
                return self.say({"success": False, "message": "no such folder, or requests still running"}, 400)
            case "/update_weights_from_disk":
                contract.weights = load_file(Path(body["model_path"]) / "model.safetensors")
                contract.label = body["weight_version"]
                contract.loads, contract.in_use = contract.loads + 1, 2
            case "/flush_cache" if contract.in_use > 0:
                contract.in_use -= 1
                return self.say({"message": "pending requests"}, 400)
            case "/flush_cache":
                contract.flushed += 1
            case _:
                return self.say({"detail": "Not Found"}, 404)
        self.say({"success": True})

    def _generate(self, body: dict[str, Any]) -> None:
        contract = self.contract
        while contract.paused and not contract.gone:
            time.sleep(0.005)
        contract.begun.append(body)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        label = contract.early or contract.label
        contract.early = contract.early if contract.always_early else ""
        with suppress(OSError):
            self.line(json.dumps(chunk(7, label=label)))
            while contract.held.is_set() and not contract.gone and not contract.paused:
                time.sleep(0.005)
            if contract.gone:
                self.close_connection = True
                return
            if contract.paused:
                self.line(json.dumps({"meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "any"}}))
            else:
                last = chunk(7, 8, 9, label=contract.turns_at or label, reason="length")
                self.line(json.dumps(last))
                contract.ended.append(body)
            self.line("[DONE]")
            self.wfile.write(b"0\r\n\r\n")


def chunk(*tokens: int, label: str, reason: str = "", count: int = 0) -> dict[str, Any]:
    """Return a chunk with all tokens so far or, if `count` is given, with the last ones of `count` tokens."""
    meta = {
        "finish_reason": {"type": reason, "length": 3} if reason else None,
        "weight_version": label,
        "completion_tokens": count or len(tokens),
        "output_token_logprobs": [[-token / 10, token, None] for token in tokens],
    }
    return {"output_ids": list(tokens), "meta_info": meta}

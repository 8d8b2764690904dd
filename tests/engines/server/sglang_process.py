"""`SglangContract` in a process of its own, so that it can be killed and stopped as a real server can."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.cli.processes.ports import free_port
from tests.engines.server.contract_sglang import SETTINGS, SglangContract
from tests.forked import forked_from

MODULES = ("tests.engines.server.contract_sglang", "tests.engines.server.sending_worker")
ANSWER_S = 60.0


class SglangProcess:
    """Args: tensor_parallel: processes (in it threads) that each receive the weights. as_group: attributes of its
    `Receiving`."""

    def __init__(self, architectures: list[str], tensor_parallel: int = 1) -> None:
        self._architectures, self._tensor_parallel, self.port = architectures, tensor_parallel, free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **of_group: Any) -> None:
        """Start it again, at the same address."""
        context = forked_from(*MODULES)
        self._pipe, theirs = context.Pipe()
        given = theirs, self.port, self._architectures, self._tensor_parallel
        self._process = context.Process(target=serve, args=given)
        self._process.start()
        theirs.close()
        self.set(**of_group)

    def set(self, **of_group: Any) -> None:
        """Set attributes of its `Receiving`."""
        self._ask(of_group)

    def blind(self) -> None:
        """It does not see the worker's folders from now on."""
        self._ask("blind")

    def state(self) -> dict[str, Any]:
        return self._ask(None)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_for_end(self) -> None:
        self._process.join(ANSWER_S)
        assert self._process.exitcode == -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _ask(self, question: Any) -> Any:
        self._pipe.send(question)
        assert self._pipe.poll(ANSWER_S), f"no answer from the server at {self.url}"
        return self._pipe.recv()


def serve(pipe: Connection, port: int, architectures: list[str], tensor_parallel: int) -> None:
    contract = SglangContract(architectures, port=port)
    contract.scores_weights = True
    contract.instead["/server_info"] = SETTINGS | {"random_seed": contract.seed, "tp_size": tensor_parallel}
    while True:
        try:
            match pipe.recv():
                case dict(of_group):
                    vars(contract.group).update(of_group)
                case "blind":
                    contract.blind = True
        except EOFError:  # the test has ended
            os._exit(0)
        pipe.send(
            {
                "label": contract.label,
                "paused": contract.paused,
                "weights": {name: each.numpy().copy() for name, each in contract.weights.items()},
                "mean": contract.mean(),
                "read": contract.loads,
                "updates": contract.group.updates,
                "session": contract.group.session,
                "groups": list(contract.group.groups),
                "begun": len(contract.begun),
                "flushed": contract.flushed,
            }
        )

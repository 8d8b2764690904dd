"""`python -m asyncrl.environments.tools.host FUNCTIONS CONTROL_FD PARENT_PID`: runs the user's tools.

This process imports them once and reports their specs. Each byte on the control socket brings the socket of a new
session, for which it forks. A session is killed alone: one that hangs or crashes does not affect the others.

consumes:     sockets of sessions on the control socket; calls on a session's own socket
waits for:    the next of them, without a deadline: the worker owns the deadlines, and kills a session past one
unblocked by: the worker writing, or closing its end (end of file: exit)
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl.environments.tools.schema import CallFault, Tool, tool_of, tools_of_class
from asyncrl.errors import ConfigError
from asyncrl.plain_text import make_streams_plain
from asyncrl.rewards.wire import FrameBuffer, pack_frame
from asyncrl.storage.log_stream import take_pipes
from asyncrl.user_code import load_function
from asyncrl.utils.process_tree import die_with_parent

SETTING = "environment.args.functions"
READ_BYTES = 1 << 16


class Toolbox:
    """All tools by name. A class has one object per session, created at its first call."""

    def __init__(self, functions: Sequence[str]) -> None:
        """Raises ConfigError: a function cannot be loaded or has no types, or two have the same name."""
        self.tools: dict[str, Tool] = {}
        self._owners: dict[str, type] = {}
        self._objects: dict[type, Any] = {}
        for function in functions:
            self._add(function, load_function(function, SETTING))

    @property
    def stateful(self) -> list[str]:
        """Names of the tools that belong to a class."""
        return sorted(self._owners)

    def _add(self, where: str, found: Any) -> None:
        given = f"{SETTING}={where}"
        for tool in tools_of_class(found, given) if inspect.isclass(found) else [tool_of(found, given)]:
            if tool.name in self.tools:
                raise ConfigError(f"{given}: there are two tools named {tool.name}. Rename one")
            self.tools[tool.name] = tool
            if inspect.isclass(found):
                self._owners[tool.name] = found

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Return whether the call succeeded, and the text that the policy reads."""
        tool = self.tools[name]
        try:
            given = tool.checked(arguments)
            owner = self._owners.get(name)
            if owner is not None and owner not in self._objects:
                self._objects[owner] = owner()
            bound = (self._objects[owner],) if owner is not None else ()
            answer = tool.function(*bound, **given)
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
            return True, _as_text(answer)
        except CallFault as fault:
            return False, f"Error: {fault}"
        except Exception as error:  # user code at a process boundary: the policy reads the error
            return False, f"Error: {type(error).__name__}: {error}"


def _as_text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    return "" if answer is None else json.dumps(answer, ensure_ascii=False, default=str)


def main(functions: Sequence[str], control_fd: int, parent_pid: int) -> int:
    for pipe in take_pipes():
        os.close(pipe)
    make_streams_plain()
    die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    try:
        box = Toolbox(functions)
    except ConfigError as error:
        control.sendall(pack_frame(["refused", str(error)]))
        return 2
    control.sendall(pack_frame(["ready", [tool.spec for tool in box.tools.values()], box.stateful]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of sessions is not needed
    own_pid = os.getpid()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return 0
        for fd in fds:
            if os.fork() == 0:
                control.close()
                _session(box, socket.socket(fileno=fd), own_pid)
            os.close(fd)


def _session(box: Toolbox, link: socket.socket, host_pid: int) -> None:
    """Run one session; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # so that processes started by a tool are killed with it
        die_with_parent(host_pid)
        link.sendall(pack_frame([os.getpid()]))
        buffer = FrameBuffer()
        while data := link.recv(READ_BYTES):
            for call_id, name, arguments in buffer.feed(data):
                link.sendall(pack_frame([call_id, *box.call(name, arguments)]))
    except OSError:  # the worker has closed its end
        pass
    finally:
        os._exit(0)  # not sys.exit: the host's open files belong to the host


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

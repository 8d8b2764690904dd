"""`environment.name=python`: the policy writes programs, which run in a sandbox, and reads their output."""

from __future__ import annotations

import asyncio
import logging
import math

from asyncrl.environments.tools.calling import Budget, Calling, OneTool, check_positive, sound
from asyncrl.environments.tools.styles import Fenced, Native, Style, Tagged
from asyncrl.errors import ConfigError, EpisodeError, SandboxError
from asyncrl.sandbox.level import Level, Reason
from asyncrl.sandbox.limits import Limits, Outcome
from asyncrl.sandbox.running import chosen_level, run

log = logging.getLogger(__name__)

TOOL, ARGUMENT = "python", "code"
DESCRIPTION = (
    "Run a Python program. It starts anew each time; what it prints comes back, and the value of an expression in its "
    "last line."
)
STYLES: dict[str, tuple[Style, str]] = {
    "tool": (Native(), ""),
    "block": (
        Fenced(tool=TOOL, argument=ARGUMENT, languages=("python", "python3", "py")),
        "You can run Python: write a block that begins with ```python and ends with ```, then end your turn. What it "
        "prints is the next message. Each program starts anew. Answer without such a block when you are done.",
    ),
    "tag": (
        Tagged(tool=TOOL, argument=ARGUMENT, tag="code", result="interpreter"),
        "You can run Python while you think: write a program between <code> and </code>. What it prints follows at "
        "once, between <interpreter> and </interpreter>, and you go on. Each program starts anew.",
    ),
}
"""Values of `environment.args.call`: how programs are written, and the instructions that the policy gets."""

FILE = "program.py"
RUNNER = f"""\
import ast, sys, traceback
with open({FILE!r}, encoding="utf-8") as file:
    source = file.read()
try:
    tree = ast.parse(source, {FILE!r})
except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
    sys.exit("".join(traceback.format_exception_only(error)))
last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
space = {{"__name__": "__main__"}}
try:
    exec(compile(tree, {FILE!r}, "exec"), space)
    exec(compile(ast.Interactive(last), {FILE!r}, "single"), space)
except SystemExit:
    raise
except BaseException as error:
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    sys.exit(1)
"""
"""Runs a program inside the sandbox: like Python, except that an expression at the end is printed."""
LAST_WORDS = 2000
"""Limit on the characters of standard error that the policy reads."""
WHY = {
    Reason.TIMED_OUT: "it took longer than {timeout_s:g} s and was ended",
    Reason.MEMORY: "it used more than {memory_mb} MB of memory and was ended",
    Reason.PROCESSES: "it started too many processes and was ended",
    Reason.OUTPUT: "it printed too much and was ended",
}


class Python(Calling):
    """Scored by `reward.function`, which gets the last reply.

    Args:
        call: `tool`: a call of the chat template; `block`: a fenced block that ends the turn; `tag`: `<code>` in the
            policy's own turn, followed by `<interpreter>`.
        isolation: `namespaces`, or on explicit request `rlimits`, which does not keep programs from your files and
            network.
        timeout_s, memory_mb: limits of each program.
        processes: number of programs that run concurrently.
        max_turns, max_calls, max_calls_per_turn, max_result: see `Budget`.
        tell: whether the policy gets instructions for running programs; `system` replaces them.
    """

    def __init__(
        self,
        call: str = "tool",
        isolation: str = "namespaces",
        timeout_s: float = 10.0,
        memory_mb: int = 1024,
        processes: int = 4,
        max_turns: int = 8,
        max_calls: int = 16,
        max_calls_per_turn: int = 4,
        max_result: int = 4000,
        tell: bool = True,
        system: str = "",
    ) -> None:
        if call not in STYLES:
            raise ConfigError(f"environment.args.call must be one of {', '.join(STYLES)}; got {call!r}")
        check_positive(timeout_s=timeout_s, memory_mb=memory_mb, processes=processes)
        budget = Budget(
            max_turns=max_turns, max_calls=max_calls, max_calls_per_turn=max_calls_per_turn, max_result=max_result
        )
        level = chosen_level(isolation, "environment.name=python", "environment.args.isolation")
        if level is Level.RLIMITS:
            log.warning(
                "isolation=rlimits: programs that the model writes run as your user, with access to your files and "
                "network"
            )
        limits = Limits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s), memory_mb=memory_mb)
        style, said = STYLES[call]
        super().__init__(
            [Interpreter(level, limits, processes)],
            style=style,
            budget=budget,
            tell=tell,
            system=system or (said if tell else ""),
        )


class Interpreter(OneTool):
    """Runs one program per call, each in its own sandbox."""

    def __init__(self, level: Level, limits: Limits, processes: int) -> None:
        super().__init__(TOOL, DESCRIPTION, argument=ARGUMENT, meaning="The program.", what="program")
        self._level, self._limits = level, limits
        self._free = asyncio.Semaphore(processes)

    async def answer(self, text: str) -> str:
        """waits for: a slot, and the program's end; unblocked by: its deadline, which the sandbox enforces."""
        async with self._free:
            try:
                outcome = await asyncio.to_thread(
                    run, RUNNER, limits=self._limits, level=self._level, files={FILE: sound(text)}
                )
            except SandboxError as error:
                raise EpisodeError(f"the sandbox could not run a program: {error}") from error
        return told(outcome, self._limits)


def told(outcome: Outcome, limits: Limits) -> str:
    """Return the text about a finished program that the policy reads."""
    if outcome.succeeded:
        return outcome.stdout.rstrip() or "[nothing was printed]"
    if outcome.reason in WHY:
        said = f"Error: {WHY[outcome.reason].format(timeout_s=limits.wall_s, memory_mb=limits.memory_mb)}"
    else:
        said = outcome.stderr.strip()[-LAST_WORDS:] or f"Error: it ended with {outcome.told()}"
    return "\n".join(filter(None, (outcome.stdout.rstrip(), said)))

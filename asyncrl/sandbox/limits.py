"""Resource limits of a program in the sandbox, and its outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrl.errors import SandboxError
from asyncrl.sandbox.level import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits, all positive."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """CPU seconds of each process."""
    memory_mb: int = 1024
    """Limit on the address space of each process, and on the resident memory of all together."""
    processes: int = 32
    """Threads count as processes."""
    file_mb: int = 64
    """Size limit of each file; the scratch folder holds twice as much."""
    open_files: int = 128
    output_kb: int = 1024
    """Limit on each of standard output and standard error; the program is killed when it exceeds one."""

    def __post_init__(self) -> None:
        """Raises SandboxError."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise SandboxError(f"a sandbox's {field.name} must be above 0; got {getattr(self, field.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    stdout: str
    """What was written before the end; invalid UTF-8 is replaced."""
    stderr: str
    exit: int | None
    """Exit code; None if the program did not exit by itself."""
    signal: int = 0
    """The signal that ended the program, if any."""
    reason: Reason

    @property
    def succeeded(self) -> bool:
        return self.exit == 0

    def told(self) -> str:
        """The outcome in one line: `exit code 1: ValueError: ...`."""
        how = f"exit code {self.exit}" if self.reason is Reason.EXITED else self.reason.value
        if self.signal:
            how += f" ({self.signal})"
        last = self.stderr.strip().splitlines()[-1:] if self.exit != 0 else []
        return ": ".join([how, *last])

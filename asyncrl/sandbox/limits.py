"""What a program in the sandbox may use, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncrl.errors import SandboxError
from asyncrl.sandbox.level import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """All positive."""

    wall_s: float = 10.0
    cpu_s: int = 10
    """Of each process."""
    memory_mb: int = 1024
    """Address space of each process, and resident memory of all together."""
    processes: int = 32
    """Threads count as processes."""
    file_mb: int = 64
    """Each file; the scratch folder holds twice as much."""
    open_files: int = 128
    output_kb: int = 1024
    """Each of standard output and standard error; past it the program is killed."""

    def __post_init__(self) -> None:
        """Raises SandboxError."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise SandboxError(f"a sandbox's {field.name} must be above 0; got {getattr(self, field.name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    stdout: str
    """As far as it came; bytes that are no UTF-8 are replaced."""
    stderr: str
    exit: int | None
    """Exit code; None if it did not exit by itself."""
    signal: int = 0
    """That ended it, where one did."""
    reason: Reason

    @property
    def succeeded(self) -> bool:
        return self.exit == 0

    def told(self) -> str:
        """In one line: `exit code 1: ValueError: ...`."""
        how = f"exit code {self.exit}" if self.reason is Reason.EXITED else self.reason.value
        if self.signal:
            how += f" ({self.signal})"
        last = self.stderr.strip().splitlines()[-1:] if self.exit != 0 else []
        return ": ".join([how, *last])

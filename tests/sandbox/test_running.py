from __future__ import annotations

import asyncio
import errno
import os
import platform
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import SandboxError
from asyncrl.sandbox.level import Level, Reason
from asyncrl.sandbox.limits import Limits
from asyncrl.sandbox.running import run, unavailable
from asyncrl.utils.process_tree import command_of, descendants, is_alive
from tests.waiting import until

ROOMY = Limits(wall_s=100.0, cpu_s=60)
"""Deadlines that a busy machine does not reach."""


@pytest.fixture(params=list(Level), ids=lambda level: level.value)
def level(request) -> Level:
    if why := unavailable(request.param):
        pytest.skip(f"{request.param.value}: {why}")
    return request.param


@pytest.fixture
def apart() -> Level:
    if why := unavailable(Level.NAMESPACES):
        pytest.skip(why)
    return Level.NAMESPACES


def test_a_program_gets_its_input_and_files_and_what_it_says_comes_back(level):
    program = "import sys; print(input() + open('data/a.txt').read()); print('so', file=sys.stderr); sys.exit(3)"

    outcome = run(program, stdin="given ", files={"data/a.txt": "and read"}, level=level, limits=ROOMY)

    assert (outcome.stdout, outcome.stderr) == ("given and read\n", "so\n")
    assert (outcome.reason, outcome.exit, outcome.succeeded) == (Reason.EXITED, 3, False)
    assert outcome.told() == "exit code 3: so"


def test_half_a_letter_is_a_fault_of_the_program_and_not_of_the_sandbox(level):
    outcome = run("print('\ud800')", stdin="\ud800", files={"a.txt": "\ud800"}, level=level, limits=ROOMY)

    assert (outcome.reason, outcome.exit) == (Reason.EXITED, 1) and "SyntaxError" in outcome.stderr


@pytest.mark.slow
@pytest.mark.unhurried
def test_input_that_is_not_read_and_large_output_do_not_block(level):
    outcome = run("print('x' * 500_000)", stdin="y" * 3_000_000, level=level, limits=ROOMY)

    assert outcome.succeeded and len(outcome.stdout) == 500_001


@pytest.mark.slow
@pytest.mark.unhurried
def test_a_command_can_be_run_and_nothing_of_the_callers_variables_is_seen(level, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "s3cret")

    outcome = run(["/bin/sh", "-c", "env; echo here > file; cat file"], level=level, limits=ROOMY)

    assert outcome.stdout.endswith("here\n") and "SECRET_KEY" not in outcome.stdout


@pytest.mark.slow
@pytest.mark.unhurried
@pytest.mark.parametrize(
    ("program", "limits", "reason"),
    [
        ("import time; time.sleep(1000)", Limits(wall_s=1.0), Reason.TIMED_OUT),
        ("while True: pass", Limits(wall_s=100.0, cpu_s=1), Reason.TIMED_OUT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", ROOMY, Reason.SIGNALLED),
        ("while True: print('x' * 1000)", ROOMY, Reason.OUTPUT),
    ],
    ids=["sleeps", "loops", "segfaults", "floods"],
)
def test_what_ends_a_program_is_told(program, limits, reason, level):
    outcome = run(program, level=level, limits=limits)

    assert (outcome.reason, outcome.exit) == (reason, None)


@pytest.mark.slow
@pytest.mark.unhurried
def test_memory_beyond_the_limit_is_refused_and_of_all_together_it_ends_them(level):
    alone = run("try:\n bytearray(8 << 30)\nexcept MemoryError:\n print('refused')", level=level, limits=ROOMY)
    many = "import os, time\nfor _ in range(4): os.fork()\nheld = b'x' * (60 << 20)\ntime.sleep(100)"
    together = run(many, level=level, limits=Limits(wall_s=100.0, memory_mb=200))

    assert alone.stdout == "refused\n"
    assert together.reason is Reason.MEMORY


@pytest.mark.slow
@pytest.mark.unhurried
def test_files_beyond_the_limit_are_refused(level):
    program = "import os\nwith open('big', 'wb') as f:\n for _ in range(200): f.write(bytes(1 << 20)); f.flush()"

    outcome = run(program, level=level, limits=Limits(wall_s=100.0, file_mb=4))

    assert not outcome.succeeded and (outcome.signal == signal.SIGXFSZ or "File too large" in outcome.stderr)


HOLDS = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
try:
    for _ in range(3):
        os.truncate(os.memfd_create('held'), 50 << 20)
        print('memfd')
except OSError as error:
    print(error.errno)
print(libc.shmget(0, 50 << 20, 0o1600), libc.msgget(0, 0o1600), libc.mq_open(b'/held', 0o102, 0o600, None))
import multiprocessing.shared_memory as shared
held = shared.SharedMemory('held', create=True, size=1 << 20)
held.unlink()
"""


def test_there_is_no_memory_that_no_limit_counts(level):
    outcome = run(HOLDS, level=level, limits=ROOMY)

    assert outcome.stdout == f"{errno.ENOSYS}\n-1 -1 -1\n", outcome.stderr


FAMILIES = """
import socket
for family in range(64):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != 16 else socket.SOCK_RAW).close()
        print(family)
    except OSError:
        pass
"""


def test_sockets_are_of_kinds_that_a_namespace_keeps_in_alone(apart):
    """Those of vsock reached the machine that this one is a guest of."""
    outcome = run(FAMILIES, level=apart, limits=ROOMY)

    assert {"1", "2"} <= set(outcome.stdout.split()) <= {"1", "2", "10", "16"}, outcome.stderr


KEYRING = """
import ctypes, sys
from ctypes import c_int
libc = ctypes.CDLL(None)
add, call = {'x86_64': (248, 250), 'aarch64': (217, 219)}[PLATFORM]
if 'add' in sys.argv:
    if libc.syscall(add, b'user', b'asyncrl-test', b's3cret', 6, c_int(-3)) < 0:
        sys.exit('no keyring here')
    from asyncrl.sandbox.running import run
    print(run(open(__file__).read()).stdout)
else:
    found = libc.syscall(call, 10, c_int(-3), b'user', b'asyncrl-test', 0)
    text = ctypes.create_string_buffer(16)
    libc.syscall(call, 11, found, text, 16)
    print('found', found, text.value)
"""


def test_a_program_does_not_have_the_keyring_of_the_caller(apart, tmp_path: Path):
    (tmp_path / "looks.py").write_text(f"PLATFORM = {platform.machine()!r}{KEYRING}")

    # In a process of its own, whose session's keyring ends with it.
    script = "import ctypes, os, runpy, sys; ctypes.CDLL(None).syscall(JOIN, 1, None); runpy.run_path(sys.argv[1])"
    join = {"x86_64": "250", "aarch64": "219"}[platform.machine()]
    command = [sys.executable, "-c", script.replace("JOIN", join), str(tmp_path / "looks.py"), "add"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "no keyring" in done.stderr:
        pytest.skip(done.stderr)

    assert done.stdout.strip() == "found -1 b''", done.stderr


BOMB = """
import os, time
made = 0
try:
    while made < 400:
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(1)
        made += 1
except OSError:
    print('refused')
time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.unhurried
def test_processes_beyond_the_limit_are_refused_or_end_it_and_all_are_gone_after(level):
    before = descendants(os.getpid())

    outcome = run(BOMB, level=level, limits=Limits(wall_s=100.0, processes=16, memory_mb=256))

    assert outcome.stdout == "refused\n" or outcome.reason is Reason.PROCESSES
    assert not [process for process in descendants(os.getpid()) - before if is_alive(process)]


@pytest.mark.slow
@pytest.mark.unhurried
def test_what_a_program_leaves_running_in_a_session_of_its_own_ends_with_it(level):
    program = "import os, time\nif os.fork() == 0:\n os.setsid()\n os.fork()\n time.sleep(1000)\nprint(1)"
    before = descendants(os.getpid())

    assert run(program, level=level, limits=ROOMY).stdout == "1\n"
    assert not [process for process in descendants(os.getpid()) - before if is_alive(process)]


LOOKS = """
import os, socket, sys
for path in sys.stdin.read().split():
    try:
        print('read', path, open(path).read())
    except OSError:
        pass
for path in (os.path.expanduser('~/../x'), '/usr/x', '/etc/x', '/x', '/dev/x', '/proc/sys/kernel/hostname', OUTSIDE):
    try:
        open(path, 'w').write('x')
        print('wrote', path)
    except OSError:
        pass
for family, address in ((socket.AF_INET, ('127.0.0.1', PORT)), (socket.AF_INET, ('1.1.1.1', 53))):
    try:
        socket.create_connection(address, 2)
        print('reached', address)
    except OSError:
        pass
for pid in (1, os.getppid(), CALLER):
    try:
        os.kill(pid, 9)
        print('killed', pid)
    except OSError:
        pass
import ctypes
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    print('nested')
print(os.getuid(), len([name for name in os.listdir('/proc') if name.isdigit()]))
"""


def test_namespaces_keep_files_network_and_processes_away(apart, tmp_path: Path):
    secret, outside = tmp_path / "secret.txt", tmp_path / "outside.txt"
    secret.write_text("s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"PORT": server.getsockname()[1], "CALLER": os.getpid(), "OUTSIDE": str(outside)}
        program = "\n".join(f"{name} = {value!r}" for name, value in given.items()) + LOOKS
        outcome = run(program, stdin=f"/etc/shadow {secret} {__file__} /proc/1/environ", level=apart, limits=ROOMY)
    lines = outcome.stdout.splitlines()

    assert outcome.succeeded, outcome.stderr
    # ~/../x is in its own scratch; killing the first process of its namespace is answered and does nothing.
    assert [line for line in lines if "../x" not in line and line != "killed 1"] == [lines[-1]]
    user, processes = lines[-1].split()
    assert user == "1000" and int(processes) <= 2
    assert not outside.exists() and secret.read_text() == "s3cret"


@pytest.mark.slow
@pytest.mark.unhurried
def test_paths_can_be_shown_and_not_written(apart, tmp_path: Path):
    (tmp_path / "shown.txt").write_text("shown")
    tmp_path.chmod(0o755)  # programs of root are another user's
    program = f"print(open('{tmp_path}/shown.txt').read()); open('{tmp_path}/new', 'w')"

    outcome = run(program, level=apart, limits=ROOMY, readable=[str(tmp_path)])

    assert outcome.stdout == "shown\n" and "Read-only" in outcome.stderr and not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.unhurried
def test_a_caller_that_is_killed_takes_its_programs_with_it(level):
    script = (
        "from asyncrl.sandbox.running import run; from asyncrl.sandbox.level import Level; "
        "from asyncrl.sandbox.limits import Limits; "
        f"run('import os, time; os.setsid(); os.fork(); time.sleep(1000)', level=Level('{level.value}'), "
        "limits=Limits(wall_s=900.0))"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: sum("main.py" in command_of(process) for process in descendants(caller.pid)) == 2)
        found = descendants(caller.pid)
    finally:
        caller.kill()
        caller.wait()
    until(lambda: not any(is_alive(process) for process in found))

    assert not [command_of(process) for process in found if is_alive(process)]


@pytest.mark.slow
@pytest.mark.unhurried
def test_programs_run_side_by_side_from_asyncio(level):
    async def scenario():
        runs = (asyncio.to_thread(run, f"print({n})", level=level, limits=ROOMY) for n in range(6))
        return [outcome.stdout for outcome in await asyncio.gather(*runs)]

    assert asyncio.run(scenario()) == [f"{n}\n" for n in range(6)]


def test_a_sandbox_that_cannot_run_the_program_is_an_error_and_no_outcome(level):
    with pytest.raises(SandboxError, match="/no/such/program was not run"):
        run(["/no/such/program"], level=level)
    with pytest.raises(SandboxError, match="relative"):
        run("", files={"../x": ""}, level=level)
    with pytest.raises(SandboxError, match="memory_mb must be above 0"):
        Limits(memory_mb=0)


AS_USER = """
import os, sys
from asyncrl.sandbox import kernel
user, group = os.geteuid(), os.getegid()
try:
    kernel.unshare(kernel.CLONE_NEWUSER)
except OSError as error:
    sys.exit(f'no user namespace: {error}')
for name, text in (('setgroups', 'deny'), ('uid_map', f'1234 {user} 1'), ('gid_map', f'1234 {group} 1')):
    open(f'/proc/self/{name}', 'w').write(text)
open('/proc/sys/user/max_user_namespaces', 'w').write(sys.argv[1])
from asyncrl.sandbox.running import run, unavailable
print(unavailable() or run('import os; print(os.getuid())').stdout)
"""
"""A process that is not root, or does not know it."""


def as_user(namespaces: int) -> str:
    done = subprocess.run([sys.executable, "-c", AS_USER, str(namespaces)], capture_output=True, text=True)
    if "no user namespace" in done.stderr:
        pytest.skip(done.stderr)
    return done.stdout.strip() or done.stderr


@pytest.mark.slow
@pytest.mark.unhurried
def test_who_is_not_root_gets_the_same_sandbox():
    assert as_user(100) == "1000"


@pytest.mark.slow
@pytest.mark.unhurried
def test_a_kernel_that_refuses_namespaces_is_told_of_by_what_it_refused():
    assert "was not run at level namespaces: [Errno 28] unshare: No space left" in as_user(0)


@pytest.mark.slow
@pytest.mark.unhurried
def test_no_output_of_a_program_is_taken_for_the_watchers_word(level):
    """Nothing of the watcher is open in it."""
    program = "import os\nfor fd in range(3, 256):\n try: os.write(fd, b'{}'); print(fd)\n except OSError: pass"

    assert run(program, level=level, limits=ROOMY).stdout == ""

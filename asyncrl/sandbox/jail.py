"""Sets up the level `namespaces`: the first process of a new PID namespace, and the program that it starts.

Without root everything happens in a user namespace. Root needs none for the mounts; its program drops root.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import stat
from contextlib import nullcontext, suppress
from typing import Any

from asyncrl.sandbox import kernel
from asyncrl.sandbox.level import Level

ROOT = "/tmp"
"""Mount point of the new root, visible to this process only."""
SCRATCH = "/tmp/work"
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/etc/localtime",
)
DEVICES = ("null", "zero", "full", "random", "urandom")
USER = 1000
"""User and group id of the program, as it sees them."""
APART = 1_000_000_000
"""First of the user ids for programs started by root, each with its own: a process limit counts per user."""
NOBODY = 65534
MOST_FILES = 8192
ALL_APART = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def part(as_root: bool) -> None:
    """Leave the machine's namespaces except that of mounts; the next child is PID 1 of a new one. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(ALL_APART | (0 if as_root else kernel.CLONE_NEWUSER))
    if not as_root:
        _map_user(user, group)


def live(spec: dict[str, Any], as_root: bool, leash: int, setup: int, result: int) -> None:
    """Run as PID 1: set up the files, start the program, and end all processes when it ends.

    Args:
        leash: becomes readable when the watcher has ended.
        setup: receives errors before the program runs; closed when it runs.
        result: receives the program's wait status.
    """
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([leash], [], [], 0)[0]:  # the watcher died before the prctl took effect
        os._exit(1)
    # PID 1 ignores signals from its namespace that it does not handle; Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kernel.unshare(kernel.CLONE_NEWNS)
    owner = APART + os.stat("/proc/self").st_ino % APART if as_root else os.geteuid()
    _make_files(spec, owner if as_root else None)
    program = os.fork()
    if program == 0:
        try:
            if as_root:
                _give_up_root(owner)
            _forbid_nested()
            become(spec, SCRATCH)
        except OSError as error:
            os.write(setup, str(error).encode())
            os._exit(1)
    os.close(setup)
    while True:
        ended, status = os.wait()
        if ended == program:
            os.write(result, str(status).encode())
            os._exit(0)


def become(spec: dict[str, Any], folder: str) -> None:
    """Replace this process with the program, within its limits. Raises OSError."""
    os.chdir(folder)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    # The user who chose `rlimits` gets what the kernel supports.
    with suppress(OSError) if spec["level"] == Level.RLIMITS else nullcontext():
        kernel.withhold_calls()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and its children would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    limits, mega = spec["limits"], 1 << 20
    for which, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * mega),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega),
        (resource.RLIMIT_NPROC, limits["processes"] + spec["beside"]),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    _close_all_but_streams()
    os.execve(spec["command"][0], spec["command"], spec["environment"] | {"HOME": folder, "TMPDIR": folder})


def _close_all_but_streams() -> None:
    """Close them on a successful exec only: the descriptors that report its failure must stay open until then."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 1024)):
        if int(name) > 2:
            with suppress(OSError):
                os.set_inheritable(int(name), False)


def _make_files(spec: dict[str, Any], owner: int | None) -> None:
    kernel.mount("none", "/", "none", kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _opened([*SYSTEM, *(f"/dev/{name}" for name in DEVICES), *spec["readable"]])
    plain = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", ROOT, "tmpfs", plain, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir(f"{ROOT}/tmp")
    size = 2 * spec["limits"]["file_mb"]
    kernel.mount("tmpfs", f"{ROOT}/tmp", "tmpfs", plain, f"size={size}m,nr_inodes={MOST_FILES},mode=1777")
    for path, source in sources.items():
        _show(path, source)
    for folder in ("proc", "etc", "tmp/work"):
        os.makedirs(f"{ROOT}/{folder}", exist_ok=True)
    os.symlink("/tmp", f"{ROOT}/dev/shm")
    with open(f"{ROOT}/etc/passwd", "w") as file:
        file.write(f"user:x:{USER}:{USER}::{SCRATCH}:/bin/sh\n")
    # Some containers do not allow a new /proc mount; then there is none.
    with suppress(OSError):
        kernel.mount("proc", f"{ROOT}/proc", "proc", plain | kernel.MS_NOEXEC)
    put_files(spec["files"], f"{ROOT}{SCRATCH}")
    if owner is not None:
        for place, _, names in os.walk(f"{ROOT}{SCRATCH}"):
            for name in (place, *(f"{place}/{name}" for name in names)):
                os.chown(name, owner, owner)
    kernel.make_read_only(ROOT, below=False)
    kernel.enter_root(ROOT)


def put_files(files: dict[str, str], folder: str) -> None:
    for name, text in files.items():
        os.makedirs(os.path.dirname(f"{folder}/{name}"), exist_ok=True)
        with open(f"{folder}/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)


def _opened(paths: list[str]) -> dict[str, int | str]:
    """Map each path to a descriptor, or a system's symbolic link to its target. Opened before the new root hides
    them."""
    found: dict[str, int | str] = {}
    for path in dict.fromkeys(paths):
        if path in SYSTEM and os.path.islink(path) and path != "/etc/localtime":
            found[path] = os.readlink(path)
        elif os.path.exists(path) and not any(path.startswith(f"{other}/") for other in found):
            found[path] = os.open(path, os.O_PATH)
    return found


def _show(path: str, source: int | str) -> None:
    target = f"{ROOT}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if isinstance(source, str):
        os.symlink(source, target)
        return
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT, 0o444))
    kernel.mount(f"/proc/self/fd/{source}", target, "none", kernel.MS_BIND | kernel.MS_REC)
    if not path.startswith("/dev/"):
        kernel.make_read_only(target, below=True)
    os.close(source)


def _give_up_root(owner: int) -> None:
    for user in (owner, NOBODY):
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:
            if user == NOBODY:
                raise
            continue  # a container that has only its first 65,536 users
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        # Not needed for isolation, but inside this user namespace no further one can be created.
        with suppress(OSError):
            kernel.unshare(kernel.CLONE_NEWUSER)
            _map_user(user, user)
        return


def _map_user(user: int, group: int) -> None:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _forbid_nested() -> None:
    """Forbid user namespaces: in one, the program could reach parts of the kernel that it should not."""
    with suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")

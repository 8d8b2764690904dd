"""System calls that Python 3.11 has no function for. Each function raises OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_X32 = 0x40000000
"""On x86_64 the x32 ABI repeats the calls from this number on; no machine has other calls there."""
_WITHHELD = {
    # Keys: the caller's keyring is inherited regardless of namespaces.
    "add_key": {"x86_64": 248, "aarch64": 217},
    "request_key": {"x86_64": 249, "aarch64": 218},
    "keyctl": {"x86_64": 250, "aarch64": 219},
    # Memory that belongs to no process and is counted by no limit.
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "memfd_secret": {"x86_64": 447, "aarch64": 447},
    "shmget": {"x86_64": 29, "aarch64": 194},
    "msgget": {"x86_64": 68, "aarch64": 186},
    "mq_open": {"x86_64": 240, "aarch64": 180},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FAMILIES = (1, 2, 10, 16)
"""Allowed socket families: unix, IPv4, IPv6, netlink. Namespaces isolate these, but vsock reaches a virtual machine's
host."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd"))


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Enter new namespaces; a new PID namespace applies to the next children."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None)
    _checked(_libc.mount(*arguments), f"mount {source} at {target}")


def make_read_only(target: str, *, below: bool) -> None:
    """Make the mount at `target` read-only and ignore set-user-ID bits there; with `below` also the mounts under it."""
    wanted = _MountAttributes(set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    arguments = (
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE if below else 0),
        ctypes.byref(wanted),
        ctypes.sizeof(wanted),
    )
    _checked(_libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, *arguments), f"mount_setattr {target}")


def enter_root(folder: str) -> None:
    """Make the mount `folder` the root; the old root becomes unreachable."""
    number = _PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise OSError(38, f"pivot_root: its number on {platform.machine()} is not known here")
    os.chdir(folder)
    _checked(_libc.syscall(number, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def withhold_calls() -> None:
    """Block some system calls for this process and its descendants; they fail as on a kernel built without them."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"seccomp: the numbers of calls on {machine} are not known here")
    refused = [(_IF_EQUAL, numbers[machine]) for numbers in _WITHHELD.values()]
    refused.append((_IF_AT_LEAST, _FIRST_X32))
    most = len(refused) + len(_FAMILIES) + 3  # instructions between the first test and the last
    code = [
        (_LOAD, 0, 0, 4),  # the architecture: 32-bit calls have other numbers
        (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        *((test, most - place, 0, number) for place, (test, number) in enumerate(refused)),
        (_IF_EQUAL, 0, len(_FAMILIES) + 2, _SOCKET[machine]),
        (_LOAD, 0, 0, 16),  # its first argument
        *((_IF_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    given = ctypes.byref(_Filter(length=len(code), instructions=packed))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, given, 0, 0), "seccomp")

"""Handles of tensors for other processes on the same machine: `export` turns a tensor into bytes, `Opened` does the
reverse.

    host memory    an anonymous file (memfd) that is reached through its owner in /proc: it has no name that could stay
                   behind, and is gone with the last process that maps it, however that process ends
    GPU memory     the CUDA handle of the allocation, as torch gives it

A handle is only as trustworthy as its process: a reader copies the contents, and verifies the copy by its fingerprint.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import Any

import msgpack
import torch
from jaxtyping import UInt8

_OWN: dict[int, tuple[int, str]] = {}
"""Address of shared host memory -> its descriptor and its name."""


def machine() -> str:
    """Identifies where handles can be opened: differs on another machine, after a reboot, and in another container."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def shared_bytes(nbytes: int) -> UInt8[torch.Tensor, " bytes"]:
    """Zeros in host memory that `export` accepts; freed with the tensor and everything that maps it."""
    if not nbytes:
        return torch.zeros(0, dtype=torch.uint8)
    name = f"asyncrl-{secrets.token_hex(8)}"
    file = os.memfd_create(name)
    os.ftruncate(file, nbytes)
    tensor, mapped = _mapped(file, nbytes)
    _OWN[tensor.data_ptr()] = file, name
    weakref.finalize(mapped, _forget, tensor.data_ptr(), file)
    return tensor


def export(piece: UInt8[torch.Tensor, " bytes"], given: dict[int, list[Any]]) -> bytes:
    """Return a handle of a part of what `shared_bytes` made, or of GPU memory; valid while this process keeps that
    memory.

    Args:
        given: handles by storage; the caller keeps it as long as their readers: torch counts every handle to GPU memory
            in files of shared memory, until its reader releases it.

    Raises:
        RuntimeError: it is in host memory that other processes cannot reach.
    """
    storage = piece.untyped_storage()
    if storage.data_ptr() not in given:
        given[storage.data_ptr()] = _handle(storage)
    packed = msgpack.packb([piece.storage_offset(), len(piece), given[storage.data_ptr()]])
    assert packed is not None
    return packed


def _handle(storage: torch.UntypedStorage) -> list[Any]:
    if storage.device.type == "cuda":
        _, *shared = storage._share_cuda_()
        return ["cuda", str(torch.cuda.get_device_properties(storage.device).uuid), *shared]
    if storage.data_ptr() in _OWN:
        file, name = _OWN[storage.data_ptr()]
        return ["memory", os.getpid(), file, name, storage.nbytes()]
    raise RuntimeError(f"{storage.nbytes()} bytes on {storage.device} are in memory that other processes cannot reach")


class Opened:
    """Tensors of other processes, each opened once and kept until this object is dropped."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.Tensor] = {}

    def tensor(self, handle: bytes) -> UInt8[torch.Tensor, " bytes"]:
        """Return the exported tensor: the same memory, to be read only.

        Raises:
            RuntimeError: its owner is gone, or it cannot be reached from here.
        """
        try:
            start, length, (kind, *fields) = msgpack.unpackb(handle)
            key = (kind, *fields[:4])  # two buckets of one size may lie in one GPU allocation, at two offsets
            if key not in self._storages:
                self._storages[key] = _cuda(*fields) if kind == "cuda" else _memory(*fields)
            found = self._storages[key][start : start + length]
            if len(found) != length:
                raise ValueError(f"{length} bytes at {start} of {len(self._storages[key])}")
        except (OSError, ValueError, TypeError) as error:
            raise RuntimeError(
                f"memory of another process cannot be opened; that process may have ended: {error}"
            ) from error
        return found


def _memory(pid: int, file: int, name: str, nbytes: int) -> torch.Tensor:
    path = f"/proc/{int(pid)}/fd/{int(file)}"
    if f"memfd:{name}" not in os.readlink(path):
        raise ValueError(f"process {pid} has something else there")
    here = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(here).st_size != nbytes:
            raise ValueError(f"it is not of {nbytes} bytes")
        return _mapped(here, nbytes)[0]
    finally:
        os.close(here)


def _cuda(uuid: str, handle: bytes, *fields: Any) -> torch.Tensor:
    torch.cuda.init()
    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            storage = torch.UntypedStorage._new_shared_cuda(number, handle, *fields)
            return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", number)).set_(storage)
    raise ValueError(f"this process does not see the GPU {uuid}")


def _mapped(file: int, nbytes: int) -> tuple[torch.Tensor, mmap.mmap]:
    mapped = mmap.mmap(file, nbytes)
    return torch.frombuffer(mapped, dtype=torch.uint8), mapped


def _forget(address: int, file: int) -> None:
    _OWN.pop(address, None)
    os.close(file)

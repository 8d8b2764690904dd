"""Writes a safetensors file front to back, without ever holding its tensors, and reads one back in the same order.

8 bytes: length of the header | header: JSON | the tensors' bytes, in the order of the header
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.weights.manifest import Bucket, Manifest

_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def rows_of(manifest: Manifest) -> list[TensorRow]:
    return [TensorRow(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in manifest.entries]


class TensorFileWriter:
    """A file that is being written; its bytes are given in the order of `rows`.

    Args:
        digest: whether `end` returns the sha256 of the file.
    """

    def __init__(
        self, path: Path, rows: Sequence[TensorRow], metadata: Mapping[str, str], *, digest: bool = False
    ) -> None:
        found: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for row in rows:
            found[row.name] = {
                "dtype": _NAMES[row.dtype],
                "shape": list(row.shape),
                "data_offsets": [offset, offset + row.nbytes],
            }
            offset += row.nbytes
        text = json.dumps(found).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._file = path.open("wb")
        self._digest = hashlib.sha256() if digest else None
        self.write(memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text))

    def write(self, part: memoryview) -> None:
        """Append bytes of tensors. Raises OSError."""
        self._file.write(part)
        if self._digest is not None:
            self._digest.update(part)

    def write_bucket(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Append the tensors of a bucket [nbytes] uint8, without the padding between them."""
        memory = buffer.numpy().data
        for entry in bucket.entries:
            self.write(memory[entry.offset : entry.offset + entry.nbytes])

    def end(self) -> tuple[int, str]:
        """Complete the file on disk; returns its size and its sha256, or ""."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        return size, self._digest.hexdigest() if self._digest is not None else ""

    def close(self) -> None:
        """Leave it as it is."""
        self._file.close()


class TensorFileReader:
    """Reads the buckets of a file that was written with `rows_of` the same manifest, in order."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._file.seek(_LENGTH_BYTES + int.from_bytes(self._file.read(_LENGTH_BYTES), "little"))

    def read_bucket(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Set `buffer` [nbytes] uint8 to the next bucket."""
        buffer.zero_()
        memory = buffer.numpy().data
        for entry in bucket.entries:
            part = memory[entry.offset : entry.offset + entry.nbytes]
            if self._file.readinto(part) != entry.nbytes:
                raise OSError(f"{self._file.name} ends within {entry.name}")

    def close(self) -> None:
        self._file.close()

"""Unused addresses on loopback."""

from __future__ import annotations

from asyncrl.cli.processes.ports import free_port


def free_address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"

"""Addresses are checked by what they resolve to."""

from __future__ import annotations

import socket
import tempfile

import pytest

from asyncrl.checks import addresses
from asyncrl.checks.addresses import (
    interface_of,
    is_everywhere,
    is_loopback,
    is_own,
    is_private,
    numeric,
    own_address,
    socket_folder,
)

EVERYWHERE = ("0", "0.0.0.0", "0x0", "00.0", "::", "0:0:0:0:0:0:0:0", "::0", "::ffff:0.0.0.0", "*", "")
LOOPBACK = ("127.0.0.1", "127.8.9.10", "127.1", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "localhost")
OTHERS = ("10.0.0.5", "192.0.2.1", "fe80::1", "1270.0.0.1", "127.no-such-name.invalid", "localhost.invalid", "a..b")


@pytest.mark.parametrize("host", EVERYWHERE)
def test_however_it_is_written_every_interface_is_every_interface(host: str) -> None:
    assert is_everywhere(host) and not is_loopback(host)


@pytest.mark.parametrize("host", LOOPBACK)
def test_however_it_is_written_loopback_is_loopback(host: str) -> None:
    assert is_loopback(host) and not is_everywhere(host)


@pytest.mark.parametrize("host", OTHERS)
def test_nothing_else_is(host: str) -> None:
    assert not is_loopback(host) and not is_everywhere(host)


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *((host, True) for host in ("10.0.0.5", "192.168.3.4", "172.16.0.1", "127.0.0.1", "::1", "fd00::1")),
        *((host, False) for host in ("169.254.169.254", "::ffff:169.254.169.254", "2852039166", "fe80::1", "8.8.8.8")),
    ],
)
def test_a_link_local_address_is_of_no_private_network(host: str, private: bool) -> None:
    assert is_private(host) == private


def answer(*hosts: str) -> list[tuple[object, ...]]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]


def test_a_name_is_what_it_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"127.evil.com": answer("203.0.113.9"), "both.example": answer("127.0.0.1", "203.0.113.9")}
    names |= {"mine.example": answer("127.0.0.2"), "all.example": answer("0.0.0.0")}
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda host, *_, **__: names[host])
    assert not is_loopback("127.evil.com") and not is_loopback("both.example") and is_loopback("mine.example")
    assert is_everywhere("all.example") and not is_everywhere("127.evil.com")
    assert numeric("tcp://mine.example:5577") == "tcp://127.0.0.2:5577"


def test_what_has_no_number_is_left_as_it_is() -> None:
    assert numeric("tcp://[::1]:5577") == "tcp://[::1]:5577"
    for address in ("ipc:///tmp/replay", "tcp://no-such-name.invalid:5577", "tcp://*:5577"):
        assert numeric(address) == address


def test_sockets_of_others_lie_where_their_paths_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name, expected in (("/scratch", 90, "/scratch"), ("/s" * 40, 27, "/s" * 40), ("/s" * 40, 28, "/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert socket_folder(name) == expected


def test_an_interface_is_found_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") == interface_of("2001:db8::1") == ""
    assert own_address("127.0.0.1") == "127.0.0.1" and is_own("127.0.0.1")
    assert not is_own("192.0.2.1") and not is_own("no-such-name.invalid")
    if socket.has_dualstack_ipv6():
        assert interface_of("::1") in ("lo", "")

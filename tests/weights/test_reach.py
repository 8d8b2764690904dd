"""Members that do not reach each other over gloo or nccl: who is blamed, and who is left out."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncrl.weights.broadcast.group import connect_store, host_store
from asyncrl.weights.broadcast.reach import Round, chosen_by_nccl, left_out, unreached
from asyncrl.weights.broadcast.wires import Link

HOST, WAIT_S = "127.0.0.1", 60.0


def found(*pairs: tuple[str, str]) -> dict[str, dict[str, str]]:
    missed: dict[str, dict[str, str]] = {}
    for one, other in pairs:
        missed.setdefault(f"{one}/1", {})[f"{other}/1"] = "10.0.0.1:5: no answer in 5 s"
    return missed


def out(*pairs: tuple[str, str], tries: dict[str, int] | None = None, members: str = "abcdefgh") -> set[str]:
    ranks = {f"{name}/1": ((tries or {}).get(name, 0), number) for number, name in enumerate(members)}
    return {name.removesuffix("/1") for name in left_out(found(*pairs), ranks)}


def test_as_few_as_possible_are_left_out_and_no_sender() -> None:
    assert out() == set()
    assert out(("a", "b")) == out(("b", "a")) == out(("a", "b"), ("b", "a")) == {"b"}, "the same one each time"
    assert out(("a", "b"), tries={"a": 1}) == {"a"}, "the one that was left out before: the other has the weights"
    assert out(("a", "b"), ("a", "c"), ("d", "a")) == {"a"}
    assert out(*itertools.product("ab", "cdefgh")) == {"a", "b"}, "the smaller of two parties"
    assert out(("a", "b"), ("b", "c"), ("c", "d")) in ({"b", "c"}, {"b", "d"}, {"a", "c"})
    assert out(("sender", "a"), ("b", "sender"), ("a", "c")) == {"a", "b"}
    assert out(("sender", "other")) == set()


def smallest(pairs: list[tuple[str, str]], members: str) -> int:
    return next(
        size
        for size in range(len(members) + 1)
        for gone in itertools.combinations(members, size)
        if all(one in gone or other in gone for one, other in pairs)
    )


def test_what_is_left_reaches_each_other_and_in_trees_nobody_too_many_is_left_out() -> None:
    chance, members = random.Random(0), "abcdefgh"
    for _ in range(300):
        tree = [(members[chance.randrange(number)], members[number]) for number in range(1, chance.randint(2, 8))]
        assert len(out(*tree)) == smallest(tree, members)
        pairs = chance.sample(list(itertools.combinations(members, 2)), chance.randint(1, 12))
        gone = out(*pairs)
        assert all(one in gone or other in gone for one, other in pairs)
        assert len(gone) <= smallest(pairs, members) + 1


def test_the_reason_names_both_and_the_address() -> None:
    (why,) = left_out(found(("a", "b")), {"a/1": (0, 1), "b/1": (0, 2)}).values()
    assert why == "a cannot connect to b, at 10.0.0.1:5: no answer in 5 s"


def test_connections_are_tried_at_once_and_each_failure_has_its_reason() -> None:
    with socket.create_server((HOST, 0)) as there, socket.socket() as refusing:
        refusing.bind((HOST, 0))
        places = {f"there{i}": there.getsockname()[:2] for i in range(40)} | {"gone": refusing.getsockname()[:2]}
        assert unreached(places, WAIT_S) == {"gone": f"{HOST}:{refusing.getsockname()[1]}: Connection refused"}


def test_a_place_that_cannot_be_tried_is_a_failure_with_its_reason_and_no_error() -> None:
    """An error here would end the learner, or the worker: the address is another member's."""
    with socket.create_server((HOST, 0)) as there:
        places = {"nowhere": ("fe80::1%none", 9), "there": there.getsockname()[:2]}
        (failed,) = unreached(places, WAIT_S).items()
    assert failed[0] == "nowhere" and failed[1].startswith("fe80::1%none:9: ")


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("", "ib0"), ("eth", "eth0"), ("=eth1,ib0", "eth1"), ("^eth,docker,lo", "ib0"), ("^=lo,docker0,eth0", "eth1"),
        ("wlan", ""), ("lo", "lo"), ("=eth", ""),
    ],
)  # fmt: skip
def test_nccl_uses_the_interface_that_its_variable_names_by_prefix_or_whole(given: str, chosen: str) -> None:
    names = ["lo", "docker0", "eth0", "eth1", "ib0"]
    assert chosen_by_nccl(names, given) == chosen
    assert [chosen_by_nccl(names[:count], "") for count in (1, 2, 4)] == ["lo", "docker0", "eth0"]


def test_a_place_that_does_not_answer_is_told_after_the_time_given() -> None:
    with socket.create_server((HOST, 0), backlog=0) as full:
        where, held = full.getsockname()[:2], []
        try:
            while True:  # until its system takes no further one
                held.append(socket.create_connection(where, 0.2))
        except TimeoutError:
            pass
        assert unreached({"full": where}, 0.2) == {"full": f"{HOST}:{where[1]}: no answer in 0.2 s"}
        for each in held:
            each.close()


@pytest.mark.parametrize(
    ("members", "backend", "interface"), [(1, "gloo", ""), (4, "gloo", ""), (2, "nccl", ""), (2, "nccl", "^none")]
)
def test_a_round_in_which_all_reach_each_other_leaves_nobody_out(members: int, backend: str, interface: str) -> None:
    names = ["learner/p", *(f"w{number}/1" for number in range(members))]
    link = Link(host=HOST, timeout_s=WAIT_S, backend=backend, interface=interface)
    ranks = dict.fromkeys(names[1:], (0, 1))
    with ThreadPoolExecutor(members) as threads:
        store, port = host_store(HOST, WAIT_S)
        rounds = [Round(connect_store(HOST, port, WAIT_S), 3, names) for _ in names[1:]]
        works = [
            threads.submit(each.take_part, name, link, threading.Event())
            for each, name in zip(rounds, names[1:], strict=True)
        ]
        assert Round(store, 3, names).judge(names[0], link, ranks) == {}
        for work in works:
            work.result(WAIT_S)

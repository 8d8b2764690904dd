"""The client's requests without a socket: order, byte credit, what goes out again, and what has waited too long."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from asyncrl.errors import WireError
from asyncrl.replay.client.requests import Request, Requests
from asyncrl.replay.codec.together import MOST, MOST_BYTES


def request(number: int, nbytes: int = 0, since: float = 0.0) -> Request:
    return Request(number, "insert" if nbytes else "acquire", None, (), nbytes, Future(), since)


def made(*sizes: int, window: int = 100) -> Requests:
    """Requests 1, 2, ... of these sizes."""
    requests = Requests()
    requests.window = window
    for number, nbytes in enumerate(sizes, start=1):
        requests.add(request(number, nbytes))
    return requests


def sending(requests: Requests) -> list[int]:
    """The numbers that go out now, to a socket that takes everything."""
    return [number for together in parcels(requests) for number in together]


def parcels(requests: Requests) -> list[list[int]]:
    """The same by the message that they share."""
    sent: list[list[int]] = []
    requests.send(lambda together: sent.append([request.number for request in together]) is None)
    return sent


def the(requests: Requests, number: int) -> Request:
    found = requests.get(number)
    assert found is not None
    return found


def test_requests_go_out_once_and_in_order() -> None:
    requests = made(0, 10, 0)
    assert sending(requests) == [1, 2, 3] == requests.sent()
    assert sending(requests) == []


def test_a_group_waits_for_credit_and_lets_requests_without_payload_pass_but_no_smaller_group() -> None:
    requests = made(60, 60, 10, 0)
    assert sending(requests) == [1, 4]
    requests.answered(the(requests, 1))
    assert sending(requests) == [2, 3]


def test_a_group_larger_than_the_window_goes_alone_and_none_goes_before_there_is_a_window() -> None:
    requests = made(500, 10, window=0)
    assert sending(requests) == []
    requests.window = 100
    assert sending(requests) == [1]
    requests.answered(the(requests, 1))
    assert sending(requests) == [2]


def test_what_the_socket_does_not_take_stays_and_keeps_its_place() -> None:
    requests = made(10, 20)
    requests.send(lambda together: False)
    assert requests.sent() == []
    assert sending(requests) == [1, 2]


def test_what_is_ready_at_the_same_time_shares_a_message_until_it_is_large() -> None:
    small, large = 10, MOST_BYTES
    requests = made(small, 0, small, large, small, window=4 * MOST_BYTES)
    assert parcels(requests) == [[1, 2, 3, 4], [5]]
    many = made(*[0] * (MOST + 1))
    assert [len(together) for together in parcels(many)] == [MOST, 1]


def test_what_the_socket_did_not_take_together_stays_in_order_before_what_waits_for_credit() -> None:
    requests = made(60, 0, 60, 0)
    took: list[list[int]] = []
    requests.send(lambda together: took.append([each.number for each in together]) is not None)
    assert took == [[1, 2], [4]] and requests.sent() == []
    assert parcels(requests) == [[1, 2], [4]], "3 has no credit, and nothing was charged for what did not leave"
    requests.answered(the(requests, 1))
    assert parcels(requests) == [[3]]


def test_only_what_was_lost_is_sent_again_and_its_bytes_are_counted_once() -> None:
    requests = made(60, 40, 60)
    assert sending(requests) == [1, 2]
    requests.resend([2, 3, 99])
    assert requests.sent() == [1]
    assert sending(requests) == [], "3 was never sent: it keeps its place before 2, and has no credit"
    requests.answered(the(requests, 1))
    assert sending(requests) == [3, 2]


def test_after_a_new_hello_everything_without_an_answer_is_sent_again() -> None:
    requests = made(60, 40)
    sending(requests)
    requests.resend_all()
    assert requests.sent() == []
    assert sending(requests) == [1, 2]


def test_an_answered_request_is_not_sent_again_and_moves_the_oldest() -> None:
    requests = made(0, 0)
    sending(requests)
    assert requests.oldest == 1
    requests.resend([1])
    requests.answered(the(requests, 1))
    assert sending(requests) == [] and requests.oldest == 2 and requests.get(1) is None


def test_a_request_that_cannot_be_encoded_fails_alone() -> None:
    requests = made(10, 100)
    bad = the(requests, 1)

    def dispatch(together: Sequence[Request]) -> bool:
        if bad in together:
            raise WireError("its header is too long")
        return True

    requests.send(dispatch)
    with pytest.raises(WireError, match="too long"):
        bad.future.result(timeout=0)
    assert requests.sent() == [2], "it holds no credit"


def test_a_sent_request_is_overdue_by_the_last_word_of_the_server_and_an_unsent_one_by_its_own_wait() -> None:
    requests = made(60, 60)
    sending(requests)
    assert requests.take_overdue(now=15.0, contact=10.0, limit_s=20.0) == []
    assert [(late.number, waited) for late, waited in requests.take_overdue(25.0, 10.0, 20.0)] == [(2, 25.0)]
    assert [(late.number, waited) for late, waited in requests.take_overdue(31.0, 10.0, 20.0)] == [(1, 21.0)]
    assert requests.take_all() == []


def test_an_overdue_group_gives_its_credit_back() -> None:
    requests = made(80, 80)
    assert sending(requests) == [1]
    assert [late.number for late, _ in requests.take_overdue(now=25.0, contact=0.0, limit_s=20.0)] == [1, 2]
    requests.add(request(3, 80, since=25.0))
    assert sending(requests) == [3]


def test_waiting_for_credit_begins_anew_whenever_the_server_has_moved() -> None:
    requests = made(60, 60)
    sending(requests)
    requests.server_at(5, now=18.0)
    assert requests.take_overdue(30.0, 30.0, 20.0) == []
    requests.server_at(5, now=37.0)
    assert [late.number for late, _ in requests.take_overdue(39.0, 39.0, 20.0)] == [2]


def test_what_is_taken_at_the_end_is_all_that_had_no_answer_and_is_not_sent_any_more() -> None:
    requests = made(60, 60, 0)
    sending(requests)
    requests.answered(the(requests, 3))
    assert [request.number for request in requests.take_all()] == [1, 2]
    assert sending(requests) == []

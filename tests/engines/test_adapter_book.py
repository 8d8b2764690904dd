from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engines.vllm.adapter_book import AdapterBook, HeldAdapter


def held(book: AdapterBook, policy_version: int) -> HeldAdapter:
    adapter = book.announce(policy_version)
    book.commit(adapter)
    return adapter


def test_before_the_first_adapter_there_is_none_to_take():
    book = AdapterBook(2)
    assert book.acquire() is None
    book.release(None)
    assert book.evict() == [] and book.in_the_way() is None


def test_an_adapter_in_use_is_kept_and_the_oldest_is_in_the_way_when_slots_are_full():
    book = AdapterBook(3)
    for version in range(3):
        held(book, version)
        assert book.acquire() is not None
        assert book.evict() == []
    oldest = book.in_the_way()
    assert oldest is not None and oldest.policy_version == 0
    book.release(oldest)
    assert book.evict() == [oldest.number]
    assert book.in_the_way() is None


def test_an_adapter_that_could_not_be_loaded_is_never_taken_and_its_number_never_used_again():
    book = AdapterBook(3)
    first = held(book, 0)
    failed = book.announce(1)
    assert book.acquire() is first
    assert held(book, 1).number > failed.number


@given(st.lists(st.sampled_from(["load", "begin", "end"]), max_size=60), st.integers(2, 5))
def test_slots_are_never_exceeded_and_nobody_loses_an_adapter_in_use(events: list[str], slots: int):
    book, running = AdapterBook(slots), list[HeldAdapter]()
    loaded: set[int] = set()
    for version, event in enumerate(events):
        if event == "load":
            loaded -= set(book.evict())
            while (oldest := book.in_the_way()) is not None:
                for adapter in [adapter for adapter in running if adapter is oldest]:
                    book.release(adapter)
                    running.remove(adapter)
                loaded -= set(book.evict())
            loaded.add(held(book, version).number)
        elif event == "begin" and (adapter := book.acquire()) is not None:
            running.append(adapter)
        elif event == "end" and running:
            book.release(running.pop(0))
        assert len(loaded) == book.held <= slots
        assert {adapter.number for adapter in running} <= loaded

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ReplayError
from asyncrl.replay.core.durable.versions import VersionTree
from asyncrl.types import NO_VERSION


def example() -> VersionTree:
    """The picture in the module's docstring."""
    tree = VersionTree()
    tree.publish(0, NO_VERSION)
    for version in range(1, 5):
        tree.publish(version, version - 1)
    tree.publish(5, 2, length=0)
    tree.publish(6, 5)
    return tree


def test_the_picture_in_the_docstring_is_true() -> None:
    tree = example()
    assert (tree.distance(1, 4), tree.distance(2, 5), tree.distance(4, 6)) == (3, 0, 3)


def test_a_version_number_is_never_used_for_something_else() -> None:
    tree = example()
    tree.publish(6, 5)
    with pytest.raises(ReplayError, match="never reused"):
        tree.publish(6, 4)
    with pytest.raises(ReplayError, match="never reused"):
        tree.publish(3, 0)


def test_an_unknown_parent_or_version_is_refused() -> None:
    tree = example()
    with pytest.raises(ReplayError, match="parent 77"):
        tree.publish(9, 77)
    with pytest.raises(ReplayError, match="never published"):
        tree.distance(0, 99)


def test_initial_weights_published_again_are_the_first_ones() -> None:
    tree = example()
    tree.publish(7, NO_VERSION)
    assert tree.distance(7, 0) == 0
    assert tree.distance(7, 2) == 2


def test_a_chain_of_a_hundred_thousand_versions_is_measured_without_walking_it() -> None:
    tree = VersionTree()
    tree.publish(0, NO_VERSION)
    for version in range(1, 100_001):
        tree.publish(version, version - 1)
    start = time.process_time()
    for _ in range(10_000):
        tree.distance(3, 100_000)
    assert time.process_time() - start < 30  # Walked, it is a thousand million steps.
    assert len(tree.snapshot()) == 2


def test_a_snapshot_that_is_no_tree_is_refused() -> None:
    for broken in (None, [], [[1, 2]], [["a"]], [[True]]):
        with pytest.raises(ReplayError):
            VersionTree.restore(broken)


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from((0, 1, 1, 1))), max_size=25), st.data())
def test_distance_is_the_length_of_the_path_and_survives_a_snapshot(shape, data) -> None:
    tree = VersionTree()
    tree.publish(0, NO_VERSION)
    parents, lengths = {0: NO_VERSION}, {0: 0}
    for version, (place, length) in enumerate(shape, start=1):
        parents[version] = version - 1 if place < 0.6 else int(place * (version - 1))
        lengths[version] = length
        tree.publish(version, parents[version], length=length)

    def path(version: int) -> list[int]:
        result = []
        while version != NO_VERSION:
            result.append(version)
            version = parents[version]
        return result

    a = data.draw(st.integers(0, len(shape)))
    b = data.draw(st.integers(0, len(shape)))
    apart = set(path(a)) ^ set(path(b))
    expected = sum(lengths[version] for version in apart)
    assert tree.distance(a, b) == tree.distance(b, a) == expected
    again = VersionTree.restore(tree.snapshot())
    assert again.distance(a, b) == expected
    assert again.newest == tree.newest


def test_what_the_learner_before_a_restart_trained_further_ages_by_the_steps_that_are_left() -> None:
    tree = VersionTree()
    tree.publish(0, NO_VERSION)
    tree.publish(1, 0)
    tree.publish(2, 0, length=0, again=True)
    assert tree.distance(1, 2) == 1
    assert tree.distance(1, 2, ahead=1) == 0, "the next step from 2 stands where 1 does"
    assert tree.distance(1, 2, ahead=3) == 2


def test_a_branch_from_the_end_of_a_walk_that_is_not_over_leaves_what_the_walk_has_not_reached_again() -> None:
    tree = VersionTree()
    tree.publish(0, NO_VERSION)
    for version in (1, 2, 3):
        tree.publish(version, version - 1)
    tree.publish(4, 0, length=0, again=True)
    tree.publish(5, 4)
    tree.publish(6, 5, length=0)  # a branch, from where version 1 is
    tree.publish(7, 6)
    for grown in (tree, VersionTree.restore(tree.snapshot())):
        assert grown.distance(1, 7) == grown.distance(5, 7) == 1
        assert (grown.distance(2, 7), grown.distance(3, 7)) == (2, 3), "version 7 was not trained from them"
        assert grown.leads_to(1, 7) and not grown.leads_to(2, 7)

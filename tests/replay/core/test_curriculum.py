"""The server's side of `data.curriculum`: prompts by measured pass rate, exact over kills, checkpoints and settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st

from asyncrl.drawing.curriculum import Curriculum, Draws
from asyncrl.drawing.order import DrawOrder
from asyncrl.errors import ReplayError
from asyncrl.replay.core.admission import AdmissionSettings
from asyncrl.replay.core.core import ReplayCore
from asyncrl.replay.journal.durable import open_core
from asyncrl.replay.journal.log import JournalSettings
from asyncrl.types import NO_VERSION, Assignment, DropReason, GroupHeader
from tests.replay.helpers import Clock, header, settings
from tests.replay.memory_disk import MemoryDisk

RUN = {"run_id": "r", "run_digest": "d", "boot": "b"}
WANTED = Curriculum(low=0.1, high=0.9, explore=0.2, passes_at=0.5, weights=(2.0, 1.0), shuffle=True)
ROWS = (20, 9)
MEMBERS = 4


def admission(**changes) -> AdmissionSettings:
    changes = {"curriculum": WANTED, "group_size": MEMBERS, "max_times_sampled": 1} | changes
    return settings(groups_per_step=4, pipeline_depth=1, max_in_flight=8, **changes)


def draws_of(core: ReplayCore) -> Draws:
    assert core.state.draws is not None
    return core.state.draws


@dataclass
class Server:
    """One worker and one learner at a core whose journal survives `kill`."""

    disk: MemoryDisk = field(default_factory=MemoryDisk)
    settings: AdmissionSettings = field(default_factory=admission)
    drawn: list[int] = field(default_factory=list)
    """Prompts, in the order they were handed out first."""

    def __post_init__(self) -> None:
        self.rows = DrawOrder(ROWS, WANTED.weights, seed=5, shuffle=True, ranks=[None, None])
        self.start()
        self.core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
        self.core.publish(policy_version=0, parent=NO_VERSION)
        self.served = 0
        self.meet()
        self.held: list[Assignment] = []

    @property
    def draws(self) -> Draws:
        return draws_of(self.core)

    def start(self) -> None:
        # Small segments: most of what is known comes from the snapshot at the head of one.
        journal = JournalSettings(segment_bytes=1 << 14)
        self.core, self.writer = open_core(self.disk, self.settings, Clock(), journal=journal, run=RUN, seed=5)

    def meet(self) -> None:
        self.core.hello("w", "life", self.served)
        self.core.survey("w", "life", ROWS)
        self.writer.write_batch()

    def kill(self) -> None:
        self.writer.write_batch()
        self.disk = self.disk.power_loss()
        self.start()
        self.meet()

    def acquire(self, slots: int) -> None:
        orders = self.core.acquire("w", "life", slots).assignments
        self.drawn += [order.prompt_index for order in orders if order.attempt == 0]
        self.held += orders

    def rate(self, order: Assignment) -> float:
        """Of three kinds of rows one is solved, one hopeless."""
        drawn = self.rows[order.prompt_index]
        return (0.0, 0.5, 1.0)[(drawn.source + drawn.row) % 3]

    def made(self, order: Assignment) -> GroupHeader:
        made = header(order, (self.served, 2), group_size=MEMBERS)
        passed = round(self.rate(order) * MEMBERS)
        members = (replace(each, reward=float(n < passed)) for n, each in enumerate(made.trajectories))
        return replace(made, trajectories=tuple(members))

    def finish(self, number: int, how: str) -> None:
        if not self.held:
            return
        order = self.held.pop(number % len(self.held))
        if how == "insert":
            assert self.core.insert("w", "life", self.made(order), b"").status == "accepted"
            return
        filtered = how == "filter"
        rewards = self.made(order).member_rewards if filtered else ()
        reason = DropReason.FILTERED_ZERO_VARIANCE if filtered else DropReason.FAILED_REWARD
        self.core.fail("w", "life", order.group_id, order.attempt, reason, "", rewards)

    def learn(self) -> None:
        step = self.core.state.trained_steps
        if self.core.lease(step) is not None:
            self.core.trained(step=step, policy_version=step + 1)
            self.served = step + 1
            self.core.served("w", "life", self.served, "print")

    def act(self, what: tuple[str, int]) -> None:
        verb, number = what
        if verb == "acquire":
            self.acquire(1 + number % 6)
        elif verb == "learn":
            self.learn()
        elif verb == "commit":
            self.core.commit(self.core.state.trained_steps - 1)
        else:
            self.finish(number, verb)


ACTIONS = st.tuples(
    st.sampled_from(["acquire", "acquire", "insert", "insert", "insert", "filter", "fail", "learn", "commit"]),
    st.integers(0, 50),
)


@tried(max_examples=25)
@given(actions=st.lists(ACTIONS, min_size=20, max_size=90), kills=st.sets(st.integers(0, 89), max_size=3))
def test_a_server_that_is_killed_hands_out_what_it_would_have_handed_out(
    actions: list[tuple[str, int]], kills: set[int]
) -> None:
    killed, spared = Server(), Server()
    for number, action in enumerate(actions):
        if number in kills:
            killed.kill()
        for server in (killed, spared):
            server.act(action)
    assert killed.drawn == spared.drawn
    assert killed.draws.image() == spared.draws.image()
    state = killed.core.state
    assert len(set(killed.drawn)) == len(killed.drawn) == state.cursor  # none is lost, none comes twice
    assert sum(killed.draws.positions) == state.cursor + killed.draws.passed_over


def simulated(wanted: Curriculum | None, steps: int = 150) -> tuple[float, Counter[int]]:
    """Share of groups without variance among those drawn after each row has come once, and draws by source."""
    server = Server(settings=admission(curriculum=wanted))
    equal: list[bool] = []
    by_source: Counter[int] = Counter()
    while server.core.state.trained_steps < steps:
        server.acquire(8)
        while server.held:
            equal.append(server.rate(server.held[0]) != 0.5)
            by_source[server.rows[server.held[0].prompt_index].source] += 1
            server.finish(0, "insert")
        server.learn()
        server.core.commit(server.core.state.trained_steps - 1)
        server.writer.write_batch()
    late = equal[2 * sum(ROWS) :]
    return sum(late) / len(late), by_source


def test_fewer_groups_without_variance_are_drawn_than_at_random_and_the_mixture_keeps_its_shares() -> None:
    at_random, _ = simulated(None)
    measured, by_source = simulated(WANTED)
    assert at_random == pytest.approx(2 / 3, abs=0.03)
    assert measured == pytest.approx(2 * WANTED.explore / (1 + 2 * WANTED.explore), abs=0.06)  # 0.29
    assert abs(by_source[0] - 2 * by_source[1]) <= 3


def test_a_checkpoint_carries_what_was_measured_to_a_server_without_memory() -> None:
    server = Server()
    for _ in range(12):
        server.acquire(8)
        while server.held:
            server.finish(0, "insert")
        server.learn()
    server.core.commit(server.core.state.trained_steps - 1)
    snapshot, before = server.core.snapshot(), server.draws
    other = ReplayCore(server.settings, Clock(), seed=5)
    other.hello("w", "life 2")
    other.survey("w", "life 2", ROWS)
    other.restore(step=snapshot["step"], policy_version=server.served, snapshot=snapshot, incarnation="l2")
    assert draws_of(other).image() == before.image() and before.passed_over > 0
    without = snapshot | {"draws": None}  # of a run that began without a curriculum
    third = ReplayCore(server.settings, Clock(), seed=5)
    third.hello("w", "life 3")
    third.survey("w", "life 3", ROWS)
    third.restore(step=without["step"], policy_version=server.served, snapshot=without, incarnation="l3")
    assert sum(draws_of(third).positions) == third.state.cursor == snapshot["cursor"]


def test_a_checkpoint_of_other_rows_than_the_workers_have_counted_is_refused_and_nothing_is_changed() -> None:
    server = Server()
    for _ in range(3):
        server.acquire(8)
        while server.held:
            server.finish(0, "insert")
        server.learn()
    server.core.commit(server.core.state.trained_steps - 1)
    snapshot = server.core.snapshot()
    other = ReplayCore(admission(), Clock(), seed=5)
    other.hello("w", "life 2")
    other.survey("w", "life 2", (21, 9))
    with pytest.raises(ReplayError, match=r"draws from \[20, 9\] rows .*the workers have \[21, 9\]"):
        other.restore(step=snapshot["step"], policy_version=server.served, snapshot=snapshot, incarnation="l2")
    assert draws_of(other).rows == (21, 9) and other.state.trained_steps == 0


def test_a_curriculum_may_begin_and_end_in_the_middle_of_a_run_and_no_prompt_comes_twice() -> None:
    server = Server(settings=admission(curriculum=None))
    for wanted in (WANTED, None, WANTED):
        for _ in range(10):
            server.acquire(8)
            while server.held:
                server.finish(0, "insert")
            server.learn()
        server.settings = admission(curriculum=wanted)
        server.kill()
    assert len(set(server.drawn)) == len(server.drawn)


def test_nothing_is_drawn_before_the_rows_are_counted_and_every_worker_must_count_the_same() -> None:
    core = ReplayCore(admission(), Clock())
    core.restore(step=None, policy_version=NO_VERSION, snapshot=None, incarnation="l")
    core.publish(policy_version=0, parent=NO_VERSION)
    core.hello("w", "life", 0)
    acquired = core.acquire("w", "life", 4)
    assert not acquired.assignments and "no worker has reported yet how many rows" in acquired.waiting_for
    assert not core.has_work()
    for rows in ((20,), (20, 0), (20, 9, 1)):
        with pytest.raises(ReplayError, match="for 2 sources"):
            core.survey("w", "life", rows)
    with pytest.raises(ReplayError, match=r"of at most 16,777,216; there are 268,435,465"):
        core.survey("w", "life", (1 << 28, 9))
    core.survey("w", "life", ROWS)
    core.survey("w", "life", ROWS)
    assert core.has_work() and len(core.acquire("w", "life", 4).assignments) == 4
    with pytest.raises(ReplayError, match=r"has \[20, 8\] rows to draw from, but the run began with \[20, 9\]"):
        core.survey("w", "life", (20, 8))


def test_metrics_say_what_was_measured_and_how_many_groups_had_no_variance() -> None:
    server = Server()
    server.acquire(4)
    kinds = [server.rate(order) for order in server.held]
    for number in range(4):
        server.finish(0, "filter" if number % 2 and kinds[number] != 0.5 else "insert")
    row = server.core.run.metrics()
    assert row["data/zero_variance"] == sum(kind != 0.5 for kind in kinds) / 4
    assert row["data/pass_rate_measured"] == 4 / sum(ROWS)
    assert row["data/pass_rate_mean"] == pytest.approx(sum(kinds) / 4)
    assert row["data/pass_rate_below"] == kinds.count(0.0) / 4
    assert row["data/pass_rate_above"] == kinds.count(1.0) / 4
    draws = server.core.state.draws
    assert draws is not None and row["data/passed_over"] == draws.passed_over
    plain = ReplayCore(admission(curriculum=None), Clock())
    assert not any(name.startswith("data/pass") for name in plain.run.metrics())

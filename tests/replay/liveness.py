"""Random schedules of a replay core, and what must happen once nothing fails any more: steps are trained again, every
open group is trained or dropped, and evaluations end."""

from __future__ import annotations

from tests.replay.simulator import Simulation


def must_progress(simulation: Simulation, steps: int = 2, rounds: int = 40) -> None:
    """Check that `steps` more steps are trained, each within `rounds` rounds, if nothing fails."""
    goal = simulation.next_step + steps
    for _ in range(rounds * steps):
        for worker in simulation.workers:
            simulation._load(worker)
            simulation._acquire(worker, 2)
            simulation._score(worker)
            while worker.tasks:
                assignment, versions = worker.tasks.pop(0)
                following = simulation.core.state.buffer.untrained.get(simulation.core.state.trained_steps)
                assert simulation.core.credit() > 0 or following is not None
                header = simulation._header(worker, assignment, versions)
                simulation.core.insert(worker.name, worker.incarnation, header, b"payload")
        simulation.learn()
        simulation.learn()
        simulation.oracle.check(simulation.core)
        if simulation.next_step >= goal:
            return
    raise AssertionError(f"nobody moves: {simulation.settings}: {simulation.core.explain(simulation.next_step)}")


def nobody_starves(simulation: Simulation) -> None:
    """Check that, if nothing fails, every group open now is trained or dropped within a bounded number of steps:
    the steps that the open groups fill, those that run ahead of them, and those until they exceed the staleness
    bound."""
    settings = simulation.settings
    open_now = [group_id for group_id, state in simulation.oracle.states().items() if state != "trained"]
    fills = -(-len(open_now) * settings.max_times_sampled // settings.groups_per_step)
    for _ in range(fills + settings.max_staleness + settings.pipeline_depth + 2):
        states = simulation.oracle.states()
        left = {group_id: states[group_id] for group_id in open_now if states.get(group_id, "trained") != "trained"}
        if not left:
            return
        must_progress(simulation, steps=1)
    raise AssertionError(f"starved: {left}: {settings}: {simulation.core.explain(simulation.next_step)}")


def must_evaluate(simulation: Simulation, rounds: int = 400) -> None:
    """Check that, if nothing fails, every evaluation that was not superseded ends."""
    for _ in range(rounds):
        for worker in simulation.workers:
            simulation._load(worker)
            simulation._acquire(worker, 1)
            simulation._score(worker)
        done = simulation.core.finished_evaluations()
        if done is not None:
            simulation.oracle.evaluated(done)
            assert not simulation.oracle.evaluations, f"evaluations without a result: {simulation.oracle.evaluations}"
            return
    raise AssertionError(f"evaluations do not end: {simulation.core.explain_evaluation()}")


def run_schedule(seed: int, actions: int = 60, **options) -> Simulation:
    simulation = Simulation(seed, **options)
    try:
        simulation.run(actions)
        must_progress(simulation)
        nobody_starves(simulation)
        must_evaluate(simulation)
    except BaseException as error:
        error.add_note(f"schedule seed={seed} options={options} settings={simulation.settings}")
        raise
    return simulation

"""How fast do trajectories go from one process to another through Ray's queue?

    python -m benchmarks.ray_queue [--tokens 8192] [--seconds 4] [--each]        `benchmarks.replay` runs it too

A Ray task puts whole groups of 8 trajectories into `ray.util.queue.Queue`, one after the other, and this process gets
them; with `--each` the task puts single trajectories. Arrays from 100 KB on are handed over in shared memory, unread.
CPU is that of this process, the consumer, and of all processes that Ray has started. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import time

import psutil
import ray
from ray.util.queue import Queue

from benchmarks.parts.answer import answer, parse
from benchmarks.parts.measuring import GROUP_SIZE, Row, Size, make_group, make_trajectories, rates

WARM = 10
"""Items that are consumed before the clock starts."""


@ray.remote
def produce(queue: Queue, size: Size, each: bool) -> None:
    trajectories = make_trajectories(size)
    items = trajectories if each else (make_group(trajectories),)
    while True:
        for item in items:
            queue.put(item)


def cpu_seconds() -> float:
    me = psutil.Process()
    spent = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        spent += times.user + times.system
    return spent


def measure(size: Size, seconds: float, each: bool) -> Row:
    queue = Queue(maxsize=64)
    task = produce.remote(queue, size, each)
    for _ in range(WARM):
        queue.get()
    start, cpu, items = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - start < seconds:
        queue.get()
        items += 1
    elapsed, used = time.perf_counter() - start, cpu_seconds() - cpu
    ray.cancel(task, force=True)
    queue.shutdown(force=True)
    groups = items / GROUP_SIZE if each else items
    return rates(groups, elapsed, size) | {"cpu_us_per_group": used / groups * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--extras", type=int, default=0, help="bytes of a group's")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--each", action="store_true")
    options = parse(parser, {"tokens": 64, "seconds": 0.5})
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    row = measure(Size(options.tokens, options.extras), options.seconds, options.each)
    answer("ray_queue", row, smoke=options.smoke)


if __name__ == "__main__":
    main()

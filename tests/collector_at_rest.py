"""What a forkserver imports first; `tests.collector_awake` is the last."""

from asyncrl import collector

collector.rest()

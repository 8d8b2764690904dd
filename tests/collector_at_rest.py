"""Put the garbage collector to rest. A forkserver imports this module first, and `tests.collector_awake` last."""

from asyncrl import collector

collector.rest()

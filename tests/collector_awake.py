"""What a forkserver imports last: none of its processes goes through what all of them share."""

from asyncrl import collector

collector.wake()

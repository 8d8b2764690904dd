"""Wake the garbage collector. A forkserver imports this module last, so that its processes do not collect the objects
that they all share."""

from asyncrl import collector

collector.wake()

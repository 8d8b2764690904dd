"""Runs untrusted programs in separate processes. `running.run` is the entry point.

This package depends on Linux and on little else of asyncrl; rewards and environments call it.
"""

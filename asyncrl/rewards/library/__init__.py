"""Rewards that ship, one idea a file; `asyncrl.checks.rewards.LIBRARY` has their names.

Each reads what it must from the row: no reward knows another, none knows the process that it runs in.
"""

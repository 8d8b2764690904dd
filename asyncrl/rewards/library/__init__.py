"""Built-in rewards, one idea per file; `asyncrl.checks.rewards.LIBRARY` has their names.

Each reads what it needs from the row; rewards are independent of each other and of the process that runs them.
"""

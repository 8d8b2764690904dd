"""`asyncrl migrate`: settings of another framework as ours, line by line, with what has no equivalent and why."""

"""How a run would go, before it is started: the real core of the replay in virtual time, with costs that were measured
or given. Here: costs, the simulation, the search for the best settings, calibration. Not here: memory and placement,
which the command line (`asyncrl/cli/plan.py`) adds; torch, sockets, clocks.
"""

"""Predicts how a run will perform before it starts: the real core of the replay in virtual time, with measured or given
costs. Contains costs, the simulation, the search for the best settings and the calibration. Memory and placement are
added by the command line (`asyncrl/cli/plan.py`); no torch, sockets or clocks are used here.
"""

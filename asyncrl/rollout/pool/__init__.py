"""Keeps workers alive until the run is over, as plain processes or under Ray, on this machine or on the nodes of a
cluster. Free of torch, and independent of what a worker does."""

"""Metrics, the run folder, live views, reports and traces of a run. Does not import torch."""

"""Optimizer steps: the optimizers, the schedule, and the checks around each step. No specific model and no loss."""

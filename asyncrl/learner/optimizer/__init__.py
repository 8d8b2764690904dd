"""Optimizer steps: the optimizers, the schedule, and what guards each step. No model by name, no loss."""

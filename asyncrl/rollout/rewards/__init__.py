"""Scores of completions for a worker: whom it asks, what a trajectory has to have, and when a run whose reward never
works is ended. How a reward is computed is `asyncrl.rewards`."""

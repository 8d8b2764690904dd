"""Scores of completions for a worker: where they come from, what a trajectory must contain, and when a run whose reward
never works is ended. Rewards themselves are in `asyncrl.rewards`."""

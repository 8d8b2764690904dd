"""`asyncrl eval`: evaluate a model on a dataset, without replay server or learner. `asyncrl.evaluation` computes the
statistics; `asyncrl.rollout` runs the episodes."""

"""`asyncrl eval`: a model on a dataset, without replay server or learner. What scores mean is told by
`asyncrl.evaluation`; how an episode is made, by `asyncrl.rollout`."""

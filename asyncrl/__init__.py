"""asyncrl: asynchronous off-policy actor-learner training of language models."""

__version__ = "0.1.0"

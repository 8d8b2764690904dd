"""Weights as files: written by the learner, read where they lie (`files`) or fetched from afar (`pull`)."""

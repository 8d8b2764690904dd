"""Weights as files: written by the learner, and opened in its folder (`files`) or fetched from a server or URL
(`pull`)."""

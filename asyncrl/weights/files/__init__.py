"""Weights as files: written by the learner, and opened in its folder or fetched from a URL."""

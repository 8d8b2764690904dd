"""The run folder: its owner, the origin of its settings, and what a resume may change. Reads no metrics."""

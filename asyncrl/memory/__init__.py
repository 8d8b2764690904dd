"""Estimates the memory that each process of a run takes, from settings and the shapes in a checkpoint: for `--dry-run`,
`asyncrl plan` and the checks before a start. Loads no torch."""

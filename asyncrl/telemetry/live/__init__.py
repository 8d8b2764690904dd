"""Live views of a run in progress, from its files, logs and processes, for `asyncrl local` and `asyncrl watch`. They
never change the run."""

"""A run while it goes on, as its files, logs and processes tell of it: for `asyncrl local` and `asyncrl watch`. Nothing
here changes a run."""

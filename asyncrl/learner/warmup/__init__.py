"""Small models made by plain supervised loops, for the quickstart and the smoke tests: one process, CPU, seconds.
Nothing here is part of a run."""

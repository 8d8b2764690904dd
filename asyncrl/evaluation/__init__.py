"""What the scores of sampled answers say: estimators, intervals, tables. Pure functions over numbers; nothing here
generates, reads a file or knows a run."""

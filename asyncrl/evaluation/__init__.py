"""Statistics of evaluations: estimators, intervals and tables. Pure functions over numbers: nothing here generates
text, reads a file or knows about a run."""

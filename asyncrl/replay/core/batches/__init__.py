"""Choose the groups of a step, and their order. Pure: nothing is recorded here."""

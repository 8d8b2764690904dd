"""Choose the groups of a step, their order, and the learner rank that trains each. Pure: nothing is recorded here."""

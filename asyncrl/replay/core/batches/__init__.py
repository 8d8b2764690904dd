"""Which groups make up a step, in which order, and which learner rank trains them. Pure: nothing is recorded here."""

"""How the ranks of a learner hold the models between them: `base` says what is asked of a backend, `factory` makes
that of a run, the others are one each. No loss, no batch and no optimizer here: those are the same whoever holds the
weights (docs/backends.md).
"""

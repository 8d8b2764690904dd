"""How the ranks of a learner hold the models: `base` is the interface of a backend, `factory` makes the one of a run,
and each other module is one backend. No loss, batch or optimizer here: they do not depend on who holds the weights
(docs/backends.md).
"""

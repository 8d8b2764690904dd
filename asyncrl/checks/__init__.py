"""Checks at start, and the messages of refusals. `rules` checks settings by themselves; the modules here interpret
settings, and check what they need of the machine (`machine`, `resources`). Does not import torch."""

"""Cooperation of several ranks: collectives, which part of a tensor each has, and the ways to share a sequence, a layer
or its experts. It does not depend on the model or the loss."""

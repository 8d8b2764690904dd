"""What several ranks do together: collectives, which part of a tensor each has, and the ways to share a sequence, a
layer or its experts. Which model it is done to, and by what loss, is nothing to it."""

"""Arithmetic whose result depends on its operands alone: on no order of sums, batch-mates, threads or vector units.

Where engine and learner both compute with it (`engine.exact`), the log-prob that is recorded when a token is drawn is
bit for bit the one that the learner computes for it at the same version. Knows no room but the errors.
"""

"""Arithmetic whose results depend on the operands alone, not on summation order, batch composition, threads or SIMD.

If engine and learner both compute with it (`engine.exact`), the log-prob that is recorded when a token is sampled
equals, bit for bit, the one that the learner computes for it at the same policy version. This package depends on no
other package of asyncrl but the errors.
"""

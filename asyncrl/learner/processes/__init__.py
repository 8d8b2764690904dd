"""The processes of a learner's ranks: how torchrun starts them, their rendezvous, how they are asked to stop, and the
one restart after running out of memory. No model here."""

"""The ranks of a learner as processes: how torchrun starts them, where they meet, how they are asked to stop, and the
one restart after a step that was too large. No model here."""

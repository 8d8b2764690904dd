"""Persistent state of a learner: checkpoints are written, sealed, loaded, copied elsewhere and exported as Hugging Face
folders. Nothing here trains."""

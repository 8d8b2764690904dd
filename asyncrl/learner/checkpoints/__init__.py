"""What is kept of a learner: checkpoints written, sealed, read again, copied elsewhere, and exported as Hugging Face
folders. Nothing here trains."""

"""State that a restart loses: connected workers, running evaluations, measurements."""

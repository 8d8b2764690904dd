"""State that is lost at a restart: connected workers, running evaluations, measurements."""

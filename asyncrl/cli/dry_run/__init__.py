"""`--dry-run`: what would be started, and the memory and the GPUs that it takes, which `asyncrl plan` reckons with too.
Nothing is started, no torch."""

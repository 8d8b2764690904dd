"""`--dry-run`: shows what would be started, and estimates its memory and GPUs, which `asyncrl plan` uses as well.
Starts nothing, and does not import torch."""

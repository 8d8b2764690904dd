"""How a run writes things down: sealed folders, lines with checksums, and the wait for space on a full disk."""

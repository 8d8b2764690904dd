"""Durable storage of a run: sealed folders, lines with checksums, and waiting for space on a full disk."""

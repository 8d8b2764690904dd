"""Durable storage of a run: sealed folders, lines with checksums, and what a full disk means."""

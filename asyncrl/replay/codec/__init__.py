"""Bytes of messages and groups, both directions of each in one file. No socket, no file, no state; never pickle."""

"""Encodes and decodes messages and groups, each with both directions in one file. Uses no sockets, files or state, and
never pickle."""

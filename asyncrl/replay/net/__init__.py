"""Sockets and processes, for both ends: socket options, keys, and a clock that stops while its process is stopped."""

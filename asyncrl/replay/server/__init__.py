"""The server's event loop and what it needs: sockets, sessions, verb handlers, waiting requests, replies. Decisions
about groups are made in `core`."""

"""The durable, append-only log of a run, and the core recovered from it. What is on disk stays in here: no sockets."""

"""The durable, append-only log of a run, and recovery of the core from it. Only this package knows the files; it uses
no sockets."""

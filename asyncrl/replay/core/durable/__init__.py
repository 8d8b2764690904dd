"""State that survives a restart of the server: events, what they change, and its form on disk. It knows no clock, no
settings and no worker that is connected now."""

"""State that survives a restart of the server: events, the state they change, and its form on disk. Independent of the
clock, the settings and the connected workers."""

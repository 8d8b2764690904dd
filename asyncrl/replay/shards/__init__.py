"""The optional processes that keep payloads off the server: process, store, and what the planner knows of them."""

"""The processes of a run on this machine: their command lines, and starting, watching and ending them. Each command
decides which it needs."""

"""The processes of a run on this machine: their command lines, and what starts, watches and ends them. Which of them a
command needs is up to the command."""

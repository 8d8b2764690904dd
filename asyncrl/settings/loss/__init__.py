"""The settings of a loss: its keys, the named losses, what may be set together, and what that means."""

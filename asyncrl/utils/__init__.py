"""What belongs to no part of the system: processes of this machine. Imports nothing of asyncrl but its own modules."""

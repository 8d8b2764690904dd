"""What both ends share about sockets and processes: options, keys, a clock that stands still with its process."""

"""The other end of the socket: the two clients, and the connection that sees each request through. Nothing of the
server or the core."""

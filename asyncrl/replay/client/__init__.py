"""The client side of the socket: the clients, and the connection that sees each request through. Independent of the
server and the core."""

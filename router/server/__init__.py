"""The HTTP server: sockets, client connections, worker processes and signals."""

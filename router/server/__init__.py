"""How requests reach the application: sockets, the fast lane, ASGI, worker processes and signals."""

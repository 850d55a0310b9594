"""The router for many minutes at half of its capacity, with aborting clients, stalled bodies and failing workers.

- router: `kvrouter serve` with a report of its objects
- clients: the requests and the behaviour of clients
- run: load, faults and samples
"""

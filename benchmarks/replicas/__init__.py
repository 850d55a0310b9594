"""Several routers before one fleet: the cost of seeing only one's own requests, and the effect of sharing.

- `python -m benchmarks.replicas`: real routers, real Redis, simulated workers (`make test-replicas`)
- `python -m benchmarks.replicas.simulation`: many more, in simulated time
"""

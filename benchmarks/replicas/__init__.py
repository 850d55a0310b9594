"""Several routers before one fleet: what it costs that each sees only its own requests, and what sharing mends.

`python -m benchmarks.replicas`              real routers, real Redis, simulated workers (`make test-replicas`)
`python -m benchmarks.replicas.simulation`   many more, in simulated time
"""

"""Envoy with our picker against our router as a proxy: the same workers and requests, with one core each.

- sides: the start of each side, and its worker
- measures: the measurements of a side
- __main__: the run and its tables
- servers: gRPC servers with equal answers, in place of the picker
- grpc_servers: those servers
- crowd: many requests in flight on a few connections, well-behaved and not
- crowd_load: the load of crowd
"""

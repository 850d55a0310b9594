"""Envoy with our picker against our router as a proxy: the same workers, the same requests, one core each.

sides         how each is started
measures      what is measured of them
__main__      the run and its tables
servers       gRPC servers that answer the same, in the picker's place
grpc_servers  those
crowd         many requests in flight on a few connections, well-behaved and not
crowd_load    who asks
"""

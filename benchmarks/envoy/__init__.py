"""Envoy with our picker against our router as a proxy: the same workers, the same requests, one core each.

sides       how each is started
measures    what is measured of them
__main__    the run and its tables
"""

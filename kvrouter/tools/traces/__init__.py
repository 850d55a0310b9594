"""Traces: recorded from a router, replayed in simulation or against routers, and reported."""

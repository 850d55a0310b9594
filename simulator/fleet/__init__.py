"""A simulated fleet that replays a trace, with this project's policies before it.

trace        requests as Mooncake publishes them
profiles     how fast the simulated engines are
engine       one engine: a paged prefix cache, chunked prefill, batches
fleet        the engines, and a router that sees them through late events and chooses by this project's policies
measures     what a run is worth
sides        the policies that are compared
"""

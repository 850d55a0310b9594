"""`make bench-policy`: our policy beside its peers', in a simulated fleet that replays a trace.

trace        requests as Mooncake publishes them
workloads    traces made up: conversations and agents
profiles     how fast the simulated engines are
engine       one engine: a paged prefix cache, chunked prefill, batches
fleet        the engines, and a router that sees them through late events and chooses by this project's policies
measures     what a run is worth
grid         the cells: workloads, fleets, caches, loads; every policy in each
decisions    what a decision itself costs
report       tables in Markdown, and a plot
"""

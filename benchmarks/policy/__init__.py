"""`make bench-policy`: our policy beside its peers', in a simulated fleet that replays a trace
(`simulator.fleet`).

workloads    traces made up: conversations, agents, tools
grid         the cells: workloads, fleets, caches, loads; every policy in each
decisions    what a decision itself costs
tail         why the slowest requests waited
report       tables in Markdown, and a plot
"""

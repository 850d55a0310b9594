"""`make bench-policy`: this project's policy and its peers, which replay the same traces on a simulated fleet.

- `workloads`: generated traces: conversations, agents, tools.
- `sides`: the routers that are compared.
- `rivals`: the rules of other routers.
- `behind`: the cells in which the default is not first.
- `grid`: the cells: workloads, fleets, caches and loads.
- `measures`: the figures of a run.
- `decisions`: the processor time of a decision.
- `tail`: the waits of the slowest requests.
- `slos`: the share of SLOs met.
- `headroom`: llm-d's predicted-latency scheduling, a peer of `slos`.
- `hints`: the effect of agents' hints.
- `report`: tables in Markdown.
- `plot`: a picture of a run.
"""

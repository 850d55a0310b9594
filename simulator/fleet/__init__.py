"""A simulated fleet: a trace of requests, simulated engines, and the router's own selection and admission before them.

- `trace`: requests in Mooncake's format, and their tokens.
- `block_cache`: the blocks of an engine.
- `engine`: one engine and its rates: a paged prefix cache, chunked prefill, batches.
- `sources`: host tiers, a shared pool and peers, from which engines load blocks.
- `transfers`: the network between prefill and decode workers.
- `workers`: the workers as the router sees them, and an index that receives their events.
- `simulated_router`: the routers that are compared: the router's own objects over simulated workers.
- `virtual_time`: an event loop that never sleeps.
- `fleet`: one run.
"""

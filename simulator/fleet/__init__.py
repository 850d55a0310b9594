"""A simulated fleet: a trace of requests, simulated engines, and the router's own selection and admission before them.

- `trace`: requests in Mooncake's format.
- `tokens`: tokens for the blocks of a trace.
- `profiles`: the rates of engines.
- `engine`: one engine: a paged prefix cache, chunked prefill, batches.
- `workers`: the workers as the router sees them, and an index that receives their events.
- `sides`: the routers that are compared.
- `simulated_router`: the router's own objects over simulated workers.
- `virtual_time`: an event loop that never sleeps.
- `fleet`: one run.
"""

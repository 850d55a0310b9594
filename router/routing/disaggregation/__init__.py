"""Prefill and decode on different workers.

- `selection` chooses the decode worker, and the prefill worker if another one computes the prompt.
- `adapters` make the two requests, as each engine requires them.
- `bodies` changes a few fields of a JSON body.
"""

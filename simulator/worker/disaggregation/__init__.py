"""The simulated worker as a prefill or a decode worker: what it takes of a router, and real bytes on their way.

part       what the rest of the worker knows of it
memory     KV pages whose bytes depend on the tokens
rank       one DP rank's memory, KVManager and counters
sending    a prompt's pages on their way out
receiving  on their way in; every byte is checked
sglang     SGLang's way: both workers are told a room
nixl       vLLM's with NIXL: the prefill leases its blocks, the decode worker pulls them through its route
roles      opens what a worker's settings ask for
metrics    what is counted

Only `part` may be imported without numpy and what `worker.disaggregation` needs.
"""

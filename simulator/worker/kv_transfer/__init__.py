"""Disaggregation of simulated workers: the engines' requests, with a real transfer of bytes.

- part: the interface to the rest of the worker
- memory: KV pages whose bytes depend on the tokens
- rank: the memory, KVManager and metrics of one DP rank
- transfers: a prompt's pages sent and received; every byte is checked
- sglang: SGLang's style: both workers receive a room
- nixl: the style of vLLM with NIXL: the prefill leases its blocks, and the decode worker pulls them
- roles: the role in a worker's settings

Only `part` can be imported without numpy and the needs of `worker.kv_transfer`.
"""

"""The router: it chooses a worker for each request, and proxies the request to it.

- `app`: services in their order of start; the routes beside the proxy.
- `settings`: every setting of config.yaml, with its checks.
- `http`: HTTP/1.1 as bytes.
- `server`: sockets, HTTP connections, processes, signals.
- `auth`: canonical targets, routes, tenants and their rates.
- `apis`: the request formats of OpenAI, Anthropic and SGLang.
- `tokens`: prompts to tokens, as the engine makes them.
- `routing`: prompt, candidates, selection, assignment; prefill and decode on two workers.
- `policies`: pure functions from candidates and a request to a decision.
- `admission`: the queue of requests that no worker has capacity for.
- `forwarding`: one request: proxied, retried, continued after a failure, answered.
- `upstream`: connections to workers.

- `fleet`: workers: discovery, health, ejection.
- `cache_state`: in-flight prefixes, sent prefixes, session locations, the hit audit.
- `load`: requests and tokens in flight on each target.
- `prediction`: rates, output lengths and latency, learned from answers; SLOs.
- `sharing`: load shared between processes and replicas.

- `observability`: metrics, traces, logs, findings, the live page's data.
- `picker`: Envoy's endpoint picker.
"""

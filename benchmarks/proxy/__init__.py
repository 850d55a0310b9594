"""Our router and the Rust ones as proxies: requests a second, added latency, processor time and memory.

- prompts: the requests, of 1 KB and 64 KB
- workers: fast workers (nginx if installed), and one that streams
- sides: the routers and their start
- load: whole answers, by wrk if installed, else by our own client
- streams: many concurrent streams
- first_event: one stream after another
- relay: a relay of bytes, the limit of a router in Python
- run: every measurement, with the sides in turn
- report: the tables
- beside_events: the same requests with and without events
- event_load: the streams of those events
"""

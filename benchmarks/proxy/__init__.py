"""Our router and the Rust ones as proxies: requests a second, added latency, processor time and memory.

prompts     what is asked: 1 KB and 64 KB
workers     light workers that answer at once (nginx where there is one), and one that streams
sides       the routers: how each is started
load        whole answers: wrk where there is one, else a client of our own
streams     many streams at once
first_event one stream after the other
relay       a relay of bytes: the limit of what a router in Python can reach
run         every measurement, the sides in turn
report      the tables

beside_events  the same requests while streams bring events, and while they don't
event_load     those streams
"""

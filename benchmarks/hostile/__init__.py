"""Well-behaved clients of a router among hostile clients, workers and streams: what it costs them, and what is left.

customers        clients as there should be, with the official library: what they lose, and how long they wait
intruders        clients as there are
workers          workers that break off, lie and answer nonsense, and streams that say nonsense
hostile_process  where the intruders, workers and streams run
run              a while without the hostile ones, then with them, and what the router holds in the end
"""

"""Traces: recorded from a router, replayed in simulation or against live ones, and the report of what came of it.

recording    `kvrouter record --requests`
simulated    a trace under several policies, in a simulated fleet
prompts      made-up prompts that share prefixes as a trace says
live         a trace sent to a running router
results      what came of a replay, in figures
workload     the shape of a trace: what anybody could make of it
plots        figures as SVG
report       one HTML page
run          `kvrouter replay-trace`
"""

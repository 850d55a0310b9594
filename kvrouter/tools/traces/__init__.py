"""Traces: recorded from a router, replayed in simulation or against routers, and reported.

- recording: `kvrouter record --requests`
- live: a trace sent to a running router, with prompts made from its block IDs
- results: the answers and figures of a replay
- workload: the figures of a trace
- plots: figures as SVG
- report: one HTML page
- run: `kvrouter replay-trace`, also in a simulated fleet
"""

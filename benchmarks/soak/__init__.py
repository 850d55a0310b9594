"""The router for many minutes at half of what it can do, with clients that leave, bodies that stall, workers that die.

router    `kvrouter serve`, which also tells what it holds
clients   the requests, and what clients do to them
run       load, faults and samples
"""

"""What it costs to place a prompt, by how many targets there are and how many of them hold it (`make bench-placement`).

fleet      a router over workers that nobody asks, with something in flight everywhere
measure    the medians, of the interpreter that runs it
"""

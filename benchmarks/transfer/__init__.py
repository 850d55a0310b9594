"""`make bench-transfer`: the transfer engines between two processes, beside a memcpy and a raw socket, in one run.

workload   which blocks go where
sides      how each side moves them
process    the processes of a side: one sends, one receives
run        all sides in turn, and what was measured
"""

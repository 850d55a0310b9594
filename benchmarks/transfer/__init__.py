"""`make bench-transfer`: the transfer engines between two processes, beside a memcpy and a raw socket, in one run.

- sides: the blocks, and how each side moves them
- process: the sending and the receiving process of a side
- run: all sides in turn, and the measurements
"""

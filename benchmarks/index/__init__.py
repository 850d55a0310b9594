"""`make bench-index`: our indexer beside NVIDIA Dynamo's, fed by the same event streams in one run.

workload     what the workers' caches hold, as prompts and as encoded event batches
publisher    the event streams, in a process of their own
sides        how to start, feed and ask each indexer
timed        our indexer, with a clock around what needs nothing of Python
measure      what is measured of a running indexer
in_process   our index without streams and HTTP, beside what its C parts alone would take
report       the figures, as tables
"""

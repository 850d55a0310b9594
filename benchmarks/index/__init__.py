"""`make bench-index`: our indexer beside NVIDIA Dynamo's, with the same event streams in one run.

- workload: the contents of the workers' caches, as prompts and as encoded event batches
- publisher: the event streams, in their own process
- sides: the start, feeding and queries of each indexer
- timed: our indexer with a clock around calls that need no Python
- measure: the measurements of a running indexer
- in_process: our index without streams and HTTP, beside the cost of its C parts alone
- report: the figures, as tables
"""

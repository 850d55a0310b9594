"""Well-behaved clients of a router among hostile clients, workers and streams: their delay, and what remains
afterwards.

- intruders: hostile and broken clients
- workers: workers that interrupt answers, lie and send nonsense, and event streams of nonsense
- hostile_process: the process of intruders, workers and streams
- run: well-behaved clients of the official library, first alone and then among hostile ones
"""

"""A request on its way: its exchange with a worker, whatever way it came in."""

"""A request on its way to a worker and back, whichever way it came in."""

"""From a prompt to a worker with its load reserved."""

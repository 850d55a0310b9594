"""The queue of requests that no worker has capacity for."""

"""The index over HTTP: application, routes, queries and their answers, metrics."""

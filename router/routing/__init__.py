"""The way of a request from its body to a target with reserved load."""

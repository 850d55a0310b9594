"""Functions of the operator's own before a request is routed and after its answer."""

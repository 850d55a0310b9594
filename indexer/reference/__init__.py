"""The index in Python: the specification of the native index, and its fallback where that is not built."""

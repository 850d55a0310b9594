"""The cost of a report on the engine's thread, beside that of packing the same tokens and hashes alone."""

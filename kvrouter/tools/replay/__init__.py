"""`kvrouter replay`: a recording as live streams, and the check of an indexer against the engine's answers."""

"""`kvrouter replay`: a recording as live streams again, and the check of an indexer against what the engine said."""

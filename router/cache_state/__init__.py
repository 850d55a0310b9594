"""Cached prefixes of targets beside the index: prompts in flight, sent prompts, sessions, and the audit of hits."""

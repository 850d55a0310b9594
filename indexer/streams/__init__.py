"""Event streams of workers: the reader thread, the session of each stream, and the order of its batches."""

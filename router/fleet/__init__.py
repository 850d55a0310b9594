"""The workers: which there are, what they are, and how they do."""

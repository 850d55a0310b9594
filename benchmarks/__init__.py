"""Benchmarks: one command for each question, compared with the peer that a user would choose."""

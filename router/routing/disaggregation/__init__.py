"""Prefill and decode on different workers: when, where, and what each of them is sent.

decision   which decode worker, whether another computes the prompt, and which
adapters   what the engines' ways of disaggregation want in the two requests
bodies     JSON bodies of which a few fields change
"""

"""Prefill and decode on different workers: how the KV pages of a prompt get from one to the other."""

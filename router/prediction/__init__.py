"""Rates, output lengths and eviction pressure, learned from answers; predicted latency and SLOs."""

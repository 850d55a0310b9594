"""Shared pools: cache tiers that several workers load from. A pool holds blocks and is never a target."""

"""The public interface for custom policies: docs/own-policies.md."""

from __future__ import annotations

from router.policies.interface import VERSION, Candidate, Function, Phase, Request

__all__ = ["VERSION", "Candidate", "Function", "Phase", "Request"]

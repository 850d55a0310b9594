"""The public interface for hooks: docs/hooks.md."""

from __future__ import annotations

from router.hooks.interface import VERSION, After, Answer, Before, Refusal, Request

__all__ = ["VERSION", "After", "Answer", "Before", "Refusal", "Request"]

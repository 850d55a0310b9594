"""Dialects of engines' events, with a module each, and their registry.

maps      tagged maps: vLLM, SGLang
arrays    tagged arrays: their earlier releases
rfc1527   Mooncake's standard
"""

from __future__ import annotations

from enum import StrEnum

from kvevents.dialects import arrays, maps, rfc1527
from kvevents.dialects.dialect import Dialect


class WireForm(StrEnum):
    """Names of the dialects in settings."""

    VLLM_MAPS = "vllm"
    VLLM_ARRAYS = "vllm-arrays"
    SGLANG_MAPS = "sglang"
    SGLANG_ARRAYS = "sglang-arrays"
    STANDARD = "rfc1527"


# The first dialect that recognizes an event decodes it.
DIALECTS: dict[WireForm, Dialect] = {
    WireForm.VLLM_MAPS: maps.VLLM,
    WireForm.VLLM_ARRAYS: arrays.VLLM,
    WireForm.SGLANG_MAPS: maps.SGLANG,
    WireForm.SGLANG_ARRAYS: arrays.SGLANG,
    WireForm.STANDARD: rfc1527.STANDARD,
}

__all__ = ["DIALECTS", "Dialect", "WireForm"]

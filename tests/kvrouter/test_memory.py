"""Reuse of freed memory without system calls."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Allocates and frees sixteen bodies at a time, and prints the pages mapped in the second round.
_BODIES = """
import resource
from router.server.serving import keep_freed_memory
{prepare}
def bodies():
    for _ in range(200):
        held = [bytearray(100_000) for _ in range(16)]
bodies()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bodies()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def pages_mapped(prepare: str) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _BODIES.format(prepare=prepare)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such setting")
def test_freed_memory_is_kept_for_next_bodies() -> None:
    assert pages_mapped("keep_freed_memory()") < pages_mapped("") / 10

"""The budget of a fuzzer: a number of examples in the suite, and seconds in `make fuzz`, which prints the seed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from random import Random

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


def examples(few: int, share: float = 1.0) -> Iterator[Random]:
    """The source of each example's chance. `share`: of the seconds, where a fuzzer has several parts."""
    random, ends, count = Random(SEED), time.monotonic() + SECONDS * share, 0
    while time.monotonic() < ends if SECONDS else count < few:
        yield random
        count += 1
    print(f"seed {SEED}: {count} examples")


def damaged(random: Random, data: bytes) -> bytes:
    """Return the bytes with random damage."""
    found = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        place = random.randrange(len(found) + 1)
        match random.randrange(5):
            case 0 if place < len(found):
                found[place] ^= 1 << random.randrange(8)
            case 1:
                del found[place : place + random.randrange(9)]
            case 2:
                found[place:place] = random.randbytes(random.randrange(9))
            case 3:
                found[place : place + 8] = random.choice([b"\xff" * 8, bytes(8), bytes(7) + b"\x80", b"\xc1" * 8])
            case _:
                found = found[place:] + found[:place] if random.random() < 0.1 else found
    return bytes(found)

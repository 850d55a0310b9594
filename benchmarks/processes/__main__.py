"""The command `python -m benchmarks.processes`, which `make bench-processes` runs."""

from __future__ import annotations

from threading import Thread

from benchmarks.index.in_process import apply_cost
from benchmarks.index.workload import Workload
from benchmarks.policy.report import markdown
from benchmarks.processes.index_process import (
    EVENTS_A_SECOND,
    Asked,
    asked_here,
    asked_there,
    filled_index,
    index_process,
    keep_storing,
)
from benchmarks.processes.spread import spread

_TOKENS = (1024, 8192, 30_720)
_REPEATS = 300
_PROCESSES = 4


def main() -> None:
    """Compare an index in each process with a queried one, and two ways to share a port."""
    rows = [["reading events, best of 5", "a block", "an event"]]
    for size in (1, 16):
        costs = [apply_cost(Workload(1, 64, 256, size)) for _ in range(5)]
        block = min(cost.index + cost.decode for cost in costs)
        rows.append([f"{size} blocks an event" if size > 1 else "1 block an event", _us(block), _us(block * size)])
    print(markdown(rows), end="\n\n", flush=True)

    rows = [["a match", "tokens", "p50", "p99", "CPU here", "CPU there"]]
    index = filled_index()
    for tokens in _TOKENS:
        rows.append(["in the process", str(tokens), *_row(asked_here(index, tokens, _REPEATS))])
    Thread(target=keep_storing, args=(index,), daemon=True).start()
    for tokens in _TOKENS:
        rows.append([f"beside {EVENTS_A_SECOND} events/s", str(tokens), *_row(asked_here(index, tokens, _REPEATS))])
    del index
    for busy in (False, True):
        name = f"asked, beside {EVENTS_A_SECOND} events/s" if busy else "asked over a Unix socket"
        with index_process(busy) as path:
            for tokens in _TOKENS:
                rows.append([name, str(tokens), *_row(asked_there(path, tokens, _REPEATS))])
    print(markdown(rows), end="\n\n", flush=True)

    rows = [[f"connections of {_PROCESSES} processes", "one port each shares", "one socket that all accept from"]]
    for connections, apart in ((16, 0.0), (64, 0.0), (256, 0.0), (64, 0.005)):
        name = f"{connections}, {1000 * apart:g} ms apart" if apart else f"{connections} at once"
        sides = [spread(shared, _PROCESSES, connections, apart) for shared in (True, False)]
        rows.append([name, *(" ".join(map(str, counts)) for counts in sides)])
    print(markdown(rows))


def _row(asked: Asked) -> list[str]:
    return [_us(asked.p50), _us(asked.p99), _us(asked.cpu), _us(asked.cpu_there)]


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-4 else f"{1e6 * seconds:.0f} µs"


if __name__ == "__main__":
    main()

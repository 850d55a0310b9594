"""The figures of a run: medians over its rounds, a column for each router, and ratios of ours to the others."""

from __future__ import annotations

from statistics import median

OURS, INTERPRETED, AGAINST, NONE, LIMIT = "kvrouter", "interpreted", "other checkout", "no router", "raw relay"
_NO_PEERS = (OURS, INTERPRETED, AGAINST, NONE, LIMIT)


class Table:
    """A value for each row, router and round. `more_is_better` determines the best peer."""

    def __init__(self, title: str, more_is_better: bool) -> None:
        self.title = title
        self._more = more_is_better
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, row: str, router: str, value: float) -> None:
        """Add the value of one round."""
        self._values.setdefault(row, {}).setdefault(router, []).append(value)

    def render(self) -> str:
        """Return the table in Markdown; empty without values."""
        if not self._values:
            return ""
        routers = list(dict.fromkeys(router for row in self._values.values() for router in row))
        routers.sort(key=lambda router: _NO_PEERS.index(router) if router in _NO_PEERS else len(_NO_PEERS))
        against = AGAINST in routers
        ratios = [f"{OURS} / best peer", f"{OURS} / {LIMIT}", *([f"{OURS} / {AGAINST}"] if against else [])]
        lines = [[self.title, *routers, *ratios]]
        for name, row in self._values.items():
            medians = {router: median(values) for router, values in row.items()}
            peers = [value for router, value in medians.items() if router not in _NO_PEERS]
            best = (max(peers) if self._more else min(peers)) if peers else 0.0
            ours, limit = medians.get(OURS, 0.0), medians.get(LIMIT, 0.0)
            figures = [_number(medians[router]) if router in medians else "" for router in routers]
            lines.append([name, *figures, _ratio(ours, best), _ratio(ours, limit)])
            if against:
                lines[-1].append(_ratio(ours, medians.get(AGAINST, 0.0)))
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "\n".join(
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        )


def _ratio(ours: float, other: float) -> str:
    return f"{ours / other:.2f}" if min(ours, other) > 0 else ""  # noise can make an added time negative


def _number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

"""The figures of a run: medians over its rounds, a column for each router, and ours as a ratio to the best peer's."""

from __future__ import annotations

from statistics import median

OURS, NONE = "kvrouter", "no router"


class Table:
    """A value for each row, router and round. `more_is_better` says which peer is the best."""

    def __init__(self, title: str, more_is_better: bool) -> None:
        self.title = title
        self._more = more_is_better
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, row: str, router: str, value: float) -> None:
        """Note the value of one round."""
        self._values.setdefault(row, {}).setdefault(router, []).append(value)

    def render(self) -> str:
        """The table in Markdown; empty when nothing was added."""
        if not self._values:
            return ""
        routers = list(dict.fromkeys(router for row in self._values.values() for router in row))
        routers.sort(key=lambda router: (router != OURS, router != NONE))
        lines = [[self.title, *routers, "kvrouter / best peer"]]
        for name, row in self._values.items():
            medians = {router: median(values) for router, values in row.items()}
            peers = [value for router, value in medians.items() if router not in (OURS, NONE)]
            best = (max(peers) if self._more else min(peers)) if peers else 0.0
            ours = medians.get(OURS, 0.0)
            ratio = f"{ours / best:.2f}" if min(ours, best) > 0 else ""  # noise may add less than nothing
            lines.append([name, *(_number(medians[r]) if r in medians else "" for r in routers), ratio])
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "\n".join(
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        )


def _number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

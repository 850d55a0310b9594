"""The screen of `kvrouter top`: its tables, its keys, and its updates from a router's `/live`."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvevents.decoding import read_json
from kvrouter.fitting_table import FittingColumn, FittingTable
from router.http.client import connection_problem, refuse_redirects

SILENCE = 10.0  # seconds without an update; usually one arrives every second
_MAX_LINE = 64 * 2**20  # the first update has all ranks


class FeedError(Exception):
    """A feed that cannot be read. The message has the reason."""


@dataclass(slots=True)
class Fleet:
    """The fleet after its last update: ranks by their key, totals, the last point of the series, and requests."""

    ranks: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    point: dict[str, Any] = field(default_factory=dict)
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def take(self, update: dict[str, Any]) -> None:
        """Apply an update."""
        for key in update["gone"]:
            self.ranks.pop(key, None)
        self.ranks |= update["ranks"]
        self.totals = update["totals"]
        self.about = update.get("about", self.about)
        self.findings = update.get("findings", self.findings)
        if update["series"]:
            self.point = update["series"][-1]
        self.requests |= {seen["number"]: seen for seen in update["requests"]}
        while len(self.requests) > 64:
            del self.requests[min(self.requests)]


async def follow(url: str, token: str) -> AsyncIterator[Fleet]:
    """Yield the fleet after each update, until the router ends. Raises FeedError."""
    fleet = Fleet()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
    try:
        async with (
            aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout, read_bufsize=_MAX_LINE) as session,
            session.get(f"{url.rstrip('/')}/live", headers=headers) as response,
        ):
            if response.status in (401, 403):
                raise FeedError(f"{url} needs the admin token: set --token")
            if response.status != 200 or response.content_type != "text/event-stream":
                raise FeedError(f"{url} answers {response.status}: is this a router's URL?")
            async for line in response.content:
                if line.startswith(b"data: "):
                    fleet.take(read_json(line[6:]))
                    yield fleet
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise FeedError(f"{url}: {connection_problem(error)}") from error


Row = dict[str, Any]

_WORST = ("down", "ejected", "half_open", "new", "warming", "draining", "drained", "asleep", "paused", "ready")
_STYLES = dict.fromkeys(("ready", "live"), "green") | dict.fromkeys(("down", "ejected", "lost", "stale"), "bold red")
# Lines other than those of ranks: totals, the head of the table, requests and keys.
_OTHER_LINES = 16
_REQUESTS = 5
# More ranks than these are joined by worker where they cannot be scrolled.
_MOST_RANKS = 32


@dataclass(frozen=True, slots=True)
class Column:
    """A column and the key that sorts by it, with the `largest` values first. The lowest `matters` is omitted first."""

    key: str
    title: str
    value: Callable[[Row], Any]
    shown: Callable[[Row], str | Text]
    matters: int
    largest: bool = True


def _held(row: Row) -> int:
    return sum(row.get("held", {}).values())


def _state(state: str | None) -> Text:
    return Text((state or "-").replace("_", " "), style=_STYLES.get(state or "", "yellow"))


def _hit(row: Row) -> str:
    prompt = row.get("prompt")
    return f"{row['predicted'] / prompt:.0%} / {row['hit'] / prompt:.0%}" if prompt else "-"


def _gaps(row: Row) -> str:
    if row.get("gaps") is None:
        return "-"
    return f"{row['gaps']} / {row['replays']}" + (f", {row['lost']} lost" if row["lost"] else "")


COLUMNS = (
    Column("w", "worker", lambda row: row["worker"], lambda row: _short(row["worker"]), 10, largest=False),
    Column("d", "rank", lambda row: row["dp_rank"], lambda row: str(row["dp_rank"]), 8, largest=False),
    Column("s", "state", lambda row: _WORST.index(row["state"]), lambda row: _state(row["state"]), 9, largest=False),
    Column("e", "events", lambda row: row.get("stream") or "", lambda row: _state(row.get("stream")), 5, largest=False),
    Column("h", "held", _held, lambda row: _count(_held(row)), 4),
    Column("r", "requests", lambda row: row["requests"], lambda row: str(row["requests"]), 7),
    Column("p", "to prefill", lambda row: row["pending"], lambda row: _count(row["pending"]), 6),
    Column(
        "k",
        "KV",
        lambda row: -1 if row["kv_usage"] is None else row["kv_usage"],
        lambda row: "-" if row["kv_usage"] is None else f"{row['kv_usage']:.0%}",
        3,
    ),
    Column("a", "predicted / actual", lambda row: row.get("wrong", -1), _hit, 2),
    Column("l", "lag", lambda row: row.get("lag_ms") or -1, lambda row: _milliseconds(row.get("lag_ms")), 1),
    Column("g", "gaps / replays", lambda row: row.get("gaps") or -1, _gaps, 0),
)
KEYS = {column.key: column for column in COLUMNS}


@dataclass(slots=True)
class View:
    """The view of the table: the sorting column, its order, and the number of skipped rows."""

    key: str = "s"
    reverse: bool = False
    skip: int = 0

    def press(self, key: str) -> None:
        """Handle a key: a column's letter sorts by it, and again reverses the order; j and J scroll."""
        if key in ("j", "\x1b[B"):
            self.skip += 1
        elif key in ("J", "\x1b[A"):
            self.skip = max(self.skip - 1, 0)
        elif key in KEYS:
            self.reverse = not self.reverse if key == self.key else False
            self.key, self.skip = key, 0


def screen(fleet: Fleet, view: View, lines: int) -> RenderableType:
    """Return the screen for a terminal with this number of lines."""
    ranks = ordered(list(fleet.ranks.values()), view)
    room = max(lines - _OTHER_LINES, 3)
    view.skip = min(view.skip, max(len(ranks) - room, 0))
    return Group(
        _totals(fleet),
        _ranks(ranks[view.skip : view.skip + room], view),
        Text(f"{len(ranks)} ranks, from {view.skip + 1}" if len(ranks) > room else ""),
        _requests(fleet),
        Text("sort: " + " ".join(f"{each.key}={each.title}" for each in COLUMNS) + "   j/J: down, up   q: quit", "dim"),
    )


def by_worker(fleet: Fleet) -> Fleet:
    """Return the fleet with one row for all ranks of a worker, if it has more ranks than a list can show."""
    if len(fleet.ranks) <= _MOST_RANKS:
        return fleet
    of_worker: dict[str, list[Row]] = {}
    for row in fleet.ranks.values():
        of_worker.setdefault(row["worker"], []).append(row)
    return replace(fleet, ranks={worker: _joined(rows) for worker, rows in of_worker.items()})


def _joined(rows: list[Row]) -> Row:
    """Return the sum of a worker's ranks, with the worst states and the greatest lag among them."""
    worst = min(rows, key=lambda row: _WORST.index(row["state"]))
    streams = [row.get("stream") for row in rows]
    usages = [row["kv_usage"] for row in rows if row["kv_usage"] is not None]
    joined = worst | {"dp_rank": f"{len(rows)} ranks", "stream": next((s for s in streams if s != "live"), "live")}
    joined["kv_usage"] = max(usages, default=None)
    joined["lag_ms"] = max((row["lag_ms"] for row in rows if row.get("lag_ms") is not None), default=None)
    for name in ("requests", "pending", "prompt", "predicted", "hit", "gaps", "replays", "lost"):
        known = [row[name] for row in rows if row.get(name) is not None]
        if known:
            joined[name] = sum(known)
    held: dict[str, int] = {}
    for row in rows:
        for tier, tokens in row.get("held", {}).items():
            held[tier] = held.get(tier, 0) + tokens
    return joined | {"held": held}


def _finding_line(found: dict[str, Any]) -> Text:
    place = " ".join(str(found[name]) for name in ("worker", "model") if found.get(name))
    line = Text(f"{found.get('severity', 'warning')}: {found['finding']}", "bold red")
    return line.append(f"  {place}  {found.get('detail') or ''}\n    {found.get('action', '')}", "default")


def ordered(ranks: list[Row], view: View) -> list[Row]:
    """Return the ranks in the view's order; equal ones by worker and rank."""
    column = KEYS[view.key]
    ranks = sorted(ranks, key=lambda row: (row["worker"], row["dp_rank"], row["model"]))
    return sorted(ranks, key=column.value, reverse=column.largest is not view.reverse)


def _totals(fleet: Fleet) -> RenderableType:
    totals, point, about = fleet.totals, fleet.point, fleet.about
    shown = (
        ("workers up", f"{totals.get('up', 0)} of {totals.get('workers', 0)}"),
        ("in flight", str(totals.get("requests", 0))),
        ("queued", str(totals.get("queued", 0))),
        ("requests/s", f"{point.get('requests', 0):.1f}"),
        ("predicted", _share(point.get("predicted"))),
        ("cached", _share(point.get("cached"))),
        ("first byte p50", _seconds(point.get("ttft_p50"))),
        ("p90", _seconds(point.get("ttft_p90"))),
        ("tokens/s", _count(point.get("prompt", 0) + point.get("generated", 0))),
        ("errors/s", f"{point.get('errors', 0):.1f}"),
        ("429 and 503/s", f"{point.get('refused', 0):.1f}"),
        ("findings", str(len(fleet.findings))),
        *_sessions(totals.get("sessions", {})),
        *_fullest(totals.get("saturation", [])),
    )
    line = Text()
    for name, value in shown:
        line.append(f"{name} ", "dim").append(f"{value}   ", "bold")
    if about:
        line.append(f"kvrouter {about['version']}, policy {about['policy']}", "dim")
    return line


def _sessions(models: dict[str, dict[str, int | None]]) -> list[tuple[str, str]]:
    """Return the sessions of agents, of all models together; nothing without sessions."""
    if not models:
        return []
    live, waiting = (sum(each.get(name) or 0 for each in models.values()) for name in ("live", "waiting"))
    more = [each.get("more") for each in models.values()]
    fit = "" if None in more else f", {sum(each or 0 for each in more)} more fit"
    return [("sessions", f"{live} live, {waiting} wait{fit}")]


def _fullest(stages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the stage that is nearest to its limits, and the limit."""
    if not stages:
        return []
    fullest = max(stages, key=lambda each: each["share"])
    return [("fullest", f"{fullest['share']:.0%} of {fullest['cause']}, {fullest['stage']} of {fullest['model']}")]


def _ranks(rows: list[Row], view: View) -> RenderableType:
    columns = [
        FittingColumn(
            column.title + (" ▾" if column.key == view.key else ""),
            [column.shown(row) for row in rows],
            # The sorting column stays visible.
            column.matters if column.key != view.key else 9,
            left=column.key in "wse",
        )
        for column in COLUMNS
    ]
    return FittingTable(columns, box=None, expand=True, pad_edge=False, header_style="bold")


def _requests(fleet: Fleet) -> RenderableType:
    latest = [fleet.requests[number] for number in sorted(fleet.requests)[-_REQUESTS:]]
    columns = [
        FittingColumn("tokens", [str(seen["tokens"]) for seen in latest], 6),
        FittingColumn("cached", [str(seen["overlap"]) for seen in latest], 5),
        FittingColumn("best", [str(seen["best_overlap"]) for seen in latest], 2),
        FittingColumn("worker", [f"{_short(seen['worker'])} {seen['dp_rank']}" for seen in latest], 7, left=True),
        FittingColumn("first byte", [_milliseconds(seen["first_byte_ms"]) for seen in latest], 4),
        FittingColumn("whole", [_milliseconds(seen["whole_ms"]) for seen in latest], 3),
        FittingColumn("cost", [_cost(seen) for seen in latest], 1, left=True),
    ]
    return FittingTable(
        columns, box=None, pad_edge=False, header_style="dim", title="latest requests", title_justify="left"
    )


def _cost(seen: Row) -> str:
    terms = " ".join(f"{name}={amount:.3g}" for name, amount in seen["terms"].items() if amount)
    return f"{terms} {seen.get('unit', '')}".strip() if terms else ""


def _short(url: str) -> str:
    return url.partition("://")[2] or url


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(round(value))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return _milliseconds(None if value is None else value * 1000)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


_ALL_LINES = 100_000
_ANY_WIDTH = 240


async def run_top(url: str, token: str, once: bool, as_json: bool = False) -> None:
    """Show the fleet until `q` is pressed. With `once` or `as_json`, print it and return. Raises FeedError."""
    if as_json:
        async for fleet in follow(url, token):
            print(msgspec.json.encode(fleet).decode())
            return
        return
    console = Console()
    if once and not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_ANY_WIDTH)  # a file has no width of its own
    if once:
        async for fleet in follow(url, token):
            console.print(screen(by_worker(fleet), View(), _ALL_LINES))
            for found in fleet.findings:
                console.print(_finding_line(found), soft_wrap=True)
            return
        return
    view, latest, ended = View(), Fleet(), asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def show() -> None:
            live.update(screen(latest, view, console.size.height), refresh=True)

        def press(key: str) -> None:
            if key in ("q", "\x03"):
                ended.set()
            else:
                view.press(key)
                show()

        async def watch() -> None:
            nonlocal latest
            async for fleet in follow(url, token):
                latest = fleet
                show()

        with keys(press):
            watching = asyncio.create_task(watch())
            ending = asyncio.create_task(ended.wait())
            try:
                await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                watching.cancel()
                await asyncio.gather(watching, ending, return_exceptions=True)
    if not watching.cancelled():
        watching.result()


@contextmanager
def keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call `press` for every key on standard input, if that is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: press(os.read(number, 16).decode(errors="replace")))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)

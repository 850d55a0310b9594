"""The tables of `kvrouter match` and `kvrouter explain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvevents.decoding import read_json
from kvrouter.fitting_table import FittingColumn, FittingTable
from router.http.client import connection_problem

# Rows of a table; the rest is counted below it.
_MOST_ROWS = 10


def ask(url: str, path: str, body: dict[str, Any], token: str = "", headers: Mapping[str, str] = {}) -> Any:
    """Send a query to a router or indexer, and return its answer. Raises ConnectionError with the reason."""
    authorization = {"Authorization": f"Bearer {token}"} if token else {}
    sent = {"Content-Type": "application/json", **authorization, **headers}
    try:
        request = Request(url.rstrip("/") + path, json.dumps(body).encode(), sent)
        with urlopen(request, timeout=30) as response:
            return read_json(response.read())
    except HTTPError as error:
        if error.code in (401, 403):
            raise ConnectionError(f"{url} needs the admin token for {path}: set --token") from error
        try:
            reason = read_json(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = "is this a router's URL?"
        raise ConnectionError(f"{url} answers {error.code}: {reason}") from error
    except URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else error
        raise ConnectionError(f"{url} {connection_problem(reason)}") from error
    except HTTPException as error:
        raise ConnectionError(f"{url} does not answer in HTTP there: is its URL https://?") from error
    except OSError as error:
        raise ConnectionError(f"{url} {connection_problem(error)}") from error
    except ValueError as error:
        raise ConnectionError(f"{url} is not a router: {path} has no JSON") from error


def print_matches(url: str, token: str, body: dict[str, Any], as_json: bool) -> None:
    """Query `/match` and print its answer. Raises ConnectionError with the reason."""
    answer = ask(url, "/match", body, token)
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    console.print(_match_table(answer))
    _print_rest(console, len(answer["matches"]))


def _print_rest(console: Console, rows: int) -> None:
    if rows > _MOST_ROWS:
        console.print(f"and {rows - _MOST_ROWS} more; --json has all of them")


def _match_table(answer: dict[str, Any]) -> Table:
    table = Table(title=f"{answer['tokens']} tokens of {answer['model']}")
    elsewhere = [name for name in ("loadable", "pullable") if any(name in match for match in answer["matches"])]
    for name in ("worker", "rank", "matched", "gpu", "cpu", "disk", "unknown", *elsewhere):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for match in answer["matches"][:_MOST_ROWS]:
        tiers = match["tiers"]
        counts = (
            match["dp_rank"],
            match["matched_tokens"],
            tiers["gpu"],
            tiers["cpu"],
            tiers["disk"],
            tiers["unknown"],
            *[match.get(name, 0) for name in elsewhere],
        )
        table.add_row(match["worker"], *map(str, counts))
    return table


def print_explanation(url: str, token: str, body: dict[str, Any], headers: dict[str, str], as_json: bool) -> None:
    """Query `/explain` and print its answer. Raises ConnectionError with the reason."""
    answer = ask(url, "/explain", body, token, headers)
    if as_json:
        print(json.dumps(answer))
        return
    console = Console()
    console.print(_explanation_table(answer))
    _print_rest(console, len(answer["candidates"]))
    if slo := answer.get("slo"):
        console.print(_slo(slo))
    if decided := answer.get("disaggregation"):
        prefill = decided.get("prefill")
        where = f"on {prefill['worker']}, rank {prefill['dp_rank']}" if prefill else "on the decode worker"
        console.print(f"The prompt is computed {where}: {decided['reason']}.")


def _explanation_table(answer: dict[str, Any]) -> FittingTable:
    """Return a row for each candidate, readable at any width and for any policy."""
    candidates = answer["candidates"][:_MOST_ROWS]
    chosen = [all(each[key] == answer["choice"][key] for key in ("worker", "dp_rank")) for each in candidates]
    columns = [
        FittingColumn("", ["➤" if each else "" for each in chosen], 8),
        FittingColumn("worker", [each["worker"] for each in candidates], 9, left=True),
        FittingColumn("rank", [str(each["dp_rank"]) for each in candidates], 7),
        FittingColumn("overlap", [str(each["overlap"]) for each in candidates], 5),
        FittingColumn("loadable", [str((each.get("source") or {}).get("tokens", 0)) for each in candidates], 4),
        FittingColumn("requests", [str(each["load"]["requests"]) for each in candidates], 3),
        FittingColumn("cost", [f"{each['total']:.6g}" for each in candidates], 6),
        FittingColumn("TTFT", [_band(each["forecast"]["ttft"]) for each in candidates], 2),
        FittingColumn("terms", [_terms(each) for each in candidates], 4, left=True, wraps=True),
    ]
    title = f"{answer['tokens']} tokens for {answer['model'] or 'any model'}; cost in {answer['unit']}"
    return FittingTable(columns, title=title, box=SIMPLE_HEAD)


def _terms(candidate: dict[str, Any]) -> str:
    return ", ".join(f"{term} {figure:.6g}" for term, figure in candidate["terms"].items() if figure)


def _band(times: dict[str, float]) -> str:
    """Return an expected time with the range of nearly all outcomes."""
    expected, low, high = (f"{times[name]:.3g}" for name in ("expected", "low", "high"))
    return f"{expected} s" if low == high else f"{expected} s ({low}-{high})"


def _slo(slo: dict[str, Any]) -> str:
    """Describe whether an SLO would be met, and the remaining time."""
    spare = [
        f"{what} {'to spare' if seconds >= 0 else 'too late'}: {1000 * abs(seconds):.0f} ms"
        for what, seconds in (("TTFT", slo["ttft_to_spare"]), ("TPOT", slo["tpot_to_spare"]))
        if seconds is not None
    ]
    end = "met" if slo["met"] else "refused" if slo["refused"] else "missed"
    return f"The SLO would be {end} (chance {slo['chance']:.0%}); {', '.join(spare)}."

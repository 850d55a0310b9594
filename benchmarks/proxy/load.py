"""Whole answers at full speed: by wrk if installed, else by our own client."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import uvloop
from yarl import URL

from benchmarks.machine import LOAD_CORE, pin
from benchmarks.proxy.prompts import PATH, STAMP, bodies

_LUA = """\
local bodies = {{}}
for line in io.lines("{bodies}") do bodies[#bodies + 1] = line end
local requests, ends, turn, number = {{}}, {{}}, 0, 0
init = function(args)
  for i, body in ipairs(bodies) do
    requests[i] = wrk.format("POST", nil, {{["Content-Type"] = "application/json"}}, body)
    local first, last = requests[i]:find("{stamp}", 1, true)
    if first then requests[i], ends[i] = requests[i]:sub(1, first - 1), requests[i]:sub(last + 1) end
  end
end
request = function()
  turn = turn % #requests + 1
  if not ends[turn] then return requests[turn] end
  number = number + 1
  return requests[turn] .. string.format("%010d%010d", os.time(), number) .. ends[turn]
end
done = function(summary, latency)
  local errors = summary.errors
  print(string.format('RESULT {{"requests": %d, "seconds": %f, "p50": %f, "p99": %f, "errors": %d}}', summary.requests,
    summary.duration / 1e6, latency:percentile(50) / 1e6, latency:percentile(99) / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
"""


_STAMP = STAMP.encode()


class LoadError(Exception):
    """A request that was not answered with 200."""


@dataclass(frozen=True, slots=True)
class Load:
    """The results of a load: requests and seconds."""

    requests: float
    seconds: float
    p50: float
    p99: float

    @property
    def rate(self) -> float:
        """The requests a second."""
        return self.requests / self.seconds


def tool() -> str:
    """Return the name of the load's tool."""
    return "wrk" if shutil.which("wrk") else "a client of our own"


def loaded(url: str, size: int, connections: int, seconds: float, folder: Path, new: bool = False) -> Load:
    """Request whole answers to chats of a size. With `new`, each has a new last message. Raises LoadError."""
    made = _by_wrk if shutil.which("wrk") else _by_ourselves
    result = made(url, size, connections, seconds, folder, new)
    if result.pop("errors") or not result["requests"]:
        raise LoadError(f"{url}: not every request was answered")
    return Load(**result)


def _by_wrk(url: str, size: int, connections: int, seconds: float, folder: Path, new: bool) -> dict[str, float]:
    lines, script = folder / f"bodies-{size}-{new}", folder / f"wrk-{size}-{new}.lua"
    if not script.exists():
        lines.write_bytes(b"\n".join(bodies(size, stamped=new)) + b"\n")
        script.write_text(_LUA.format(bodies=lines, stamp=STAMP))
    command = ["taskset", "-c", str(LOAD_CORE), "wrk", "-t1", f"-c{connections}", f"-d{max(seconds, 1):.0f}s"]
    return _result([*command, "-s", str(script), url + PATH])


def _by_ourselves(url: str, size: int, connections: int, seconds: float, folder: Path, new: bool) -> dict[str, float]:  # noqa: ARG001
    how = [str(size), str(connections), str(seconds), "new" if new else "again"]
    return _result([sys.executable, "-m", "benchmarks.proxy.load", url, *how])


def _result(command: Sequence[str]) -> dict[str, float]:
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r"RESULT (.*)", output)
    if found is None:
        raise LoadError(output)
    result: dict[str, float] = json.loads(found.group(1))
    return result


class _Client(asyncio.Protocol):
    """One connection with one request after another, until `until`."""

    def __init__(self, requests: list[bytes], turn: int, until: float, times: list[float]) -> None:
        self._requests = requests
        self._turn = turn
        self._until = until
        self._times = times
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._received = b""
        self._turn = (self._turn + 1) % len(self._requests)
        request = self._requests[self._turn].replace(_STAMP, b"%020d" % time.time_ns(), 1)
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith((b"}", b"0\r\n\r\n")):
            return
        now = time.perf_counter()
        self._times.append(now - self._sent)
        if not self._received.startswith(b"HTTP/1.1 200 "):
            self._end(1)
        elif now > self._until:
            self._end(0)
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end(1)

    def _end(self, errors: int) -> None:
        if not self.over.done():
            self.over.set_result(errors)
            self._transport.close()


async def _load(url: str, size: int, connections: int, seconds: float, new: bool) -> None:
    address = URL(url)
    head = f"POST {PATH} HTTP/1.1\r\nhost: {address.authority}\r\ncontent-type: application/json\r\n".encode()
    requests = [head + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies(size, stamped=new)]
    times: list[float] = []
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    clients = [_Client(requests, turn, began + seconds, times) for turn in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, address.host or "", address.port or 80)  # type: ignore[misc]
    errors = sum(await asyncio.gather(*(client.over for client in clients)))
    p99 = quantiles(times, n=100)[98] if len(times) > 1 else times[0]
    elapsed = time.perf_counter() - began
    result = {"requests": len(times), "seconds": elapsed, "p50": median(times), "p99": p99, "errors": errors}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    pin(LOAD_CORE)
    uvloop.run(_load(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "new"))

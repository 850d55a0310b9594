"""The screen in a terminal: updates as they come, keys as they are pressed."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from kvrouter.tools.top.feed import Fleet, follow
from kvrouter.tools.top.screen import View, screen

_ALL_LINES = 100_000
_ANY_WIDTH = 240


async def run_top(url: str, token: str, once: bool) -> None:
    """Show the fleet until `q` is pressed; `once` prints it and ends. Raises FeedError."""
    console = Console()
    if once and not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_ANY_WIDTH)  # of a file nobody knows how wide it may be
    if once:
        async for fleet in follow(url, token):
            console.print(screen(fleet, View(), _ALL_LINES))
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
    """Tell of every key that is pressed on standard input, if that is a terminal."""
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

"""Fast workers: nginx if installed, else our own; streams are always from our own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import LOAD_CORE
from benchmarks.ports import free_port
from benchmarks.proxy.processes import answers, started
from benchmarks.proxy.prompts import PATH
from benchmarks.proxy.raw_worker import ANSWER, MODELS

WORKERS = 2

_NGINX = """\
worker_processes 1; daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; default_type application/json; keepalive_requests 1000000000; keepalive_timeout 300;
  client_body_buffer_size 512k; client_max_body_size 16m;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    {listen}
    location = /v1/models {{ return 200 '{models}'; }}
    location = /health {{ return 200 '{{}}'; }}
    location = {path} {{ return 200 '{answer}'; }}
  }}
}}
"""


def nginx() -> str | None:
    """Return the path of nginx; `None` if it is not installed."""
    return shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")


@contextmanager
def whole_workers(folder: Path) -> Iterator[list[str]]:
    """Run workers whose answers are sent at once, and yield their URLs."""
    binary = nginx()
    if binary is None:
        with stream_workers(folder) as urls:
            yield urls
        return
    ports = [free_port() for _ in range(WORKERS)]
    config = folder / "nginx.conf"
    listen = " ".join(f"listen 127.0.0.1:{port};" for port in ports)
    text = _NGINX.format(folder=folder, listen=listen, models=MODELS.decode(), path=PATH, answer=ANSWER.decode())
    config.write_text(text)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [binary, "-c", str(config), "-p", str(folder), "-e", str(folder / "start.log")]
    with started(command, LOAD_CORE, folder / "nginx.log", lambda: answers(f"{urls[0]}/health")):
        yield urls


@contextmanager
def stream_workers(folder: Path) -> Iterator[list[str]]:
    """Run workers that stream, and answer other requests whole. Yield their URLs."""
    ports = [free_port() for _ in range(WORKERS)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    command = [sys.executable, "-m", "benchmarks.proxy.raw_worker", str(LOAD_CORE), *map(str, ports)]
    with started(command, LOAD_CORE, folder / "raw_worker.log", lambda: answers(f"{urls[0]}/health")):
        yield urls

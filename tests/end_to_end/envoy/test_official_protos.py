"""The picker, called message by message with Envoy's own protos."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from picker_under_test import picker
from scripted_worker import scripted_worker

_PROTOS = Path(sys.prefix) / "official-protos"  # make test-envoy puts them there

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(not _PROTOS.exists(), reason="make test-envoy installs them"),
]


async def test_client_of_official_protos_is_served() -> None:
    async with scripted_worker() as worker, picker(worker.url) as (side, port):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("official_client.py")),
            str(port),
            worker.url.removeprefix("http://"),
            env=os.environ | {"PYTHONPATH": str(_PROTOS)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, output) == (0, b""), output.decode()
        await side.until_released()

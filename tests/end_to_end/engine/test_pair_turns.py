"""The second turn of a session on real prefill and decode vLLMs: what moves between them.

`make test-engine-pd` runs these tests. KV is transferred between processes over NIXL (loopback, host memory).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from engine.conversations import VOCABULARY
from engine.installation import Installation
from engine.pairs import asked, completed, metrics, pair_worker, router_before
from engine.processes import wait_for
from engine.servers import BLOCK_SIZE, RouterProcess, VllmWorker, running
from engine.web import post_json, post_reply

pytestmark = pytest.mark.engine_pd

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def pair(installation: Installation, logs: Path) -> Iterator[list[VllmWorker]]:
    """A prefill worker and a decode worker."""
    found = [pair_worker(f"turns-{role}", installation, logs) for role in ("prefill", "decode")]
    with running(*found):
        yield found


def held(router: RouterProcess, turn: str) -> int:
    """Return the tokens of a prompt that the decode worker holds, as the router knows it."""
    told = post_json(f"{router.url}/explain", {"request": asked(turn), "path": COMPLETIONS})
    tokens: int = told["candidates"][0]["overlap"]
    return tokens


def test_second_turn_moves_only_what_decode_worker_lacks(pair: list[VllmWorker], logs: Path, tmp_path: Path) -> None:
    prefill, decode = pair
    random = Random(4)
    with router_before([prefill], [decode], logs, tmp_path, patience=60.0) as router:
        router.wait_until_compared()
        for words in (100, 300, 700):
            turn = f"{words}: {' '.join(random.choices(VOCABULARY, k=words))}"
            completed(router.url, turn, 40)
            least = words // BLOCK_SIZE * BLOCK_SIZE  # each word is a token
            turn = f"{turn} {' '.join(random.choices(VOCABULARY, k=60))}"
            wait_for(lambda turn=turn, least=least: held(router, turn) >= least, 30, "the first turn is known")
            before = metrics(decode)
            headers, answer = post_reply(router.url + COMPLETIONS, asked(turn))
            after = metrics(decode)
            tokens, predicted = answer["usage"]["prompt_tokens"], int(headers["x-kvrouter-overlap-tokens"])
            moved, cached, computed = (
                after[source] - before[source]
                for source in ("external_kv_transfer", "local_cache_hit", "local_compute")
            )
            print(f"{tokens} tokens, {predicted} held by the decode worker: {moved:.0f} moved, {computed:.0f} computed")
            assert predicted == cached >= least
            assert moved + computed == tokens - predicted
            assert computed <= BLOCK_SIZE

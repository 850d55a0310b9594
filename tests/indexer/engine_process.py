"""A simulated engine in a process of its own, with the publisher that engines use: `LIVE REPLAY SEED STEPS`.

It prints its endpoints, publishes `STEPS` random steps (0: unlimited), and runs until it is killed.
"""

from __future__ import annotations

import sys
import threading
import time
from itertools import count
from random import Random

from random_engine import Engine

from kvevents import EventBatch
from worker import ZmqEventPublisher


def main(live: str, replay: str, seed: int, steps: int) -> None:
    publisher = ZmqEventPublisher(endpoint=live, replay_endpoint=replay, bind=True)
    print(publisher.endpoint, publisher.replay_endpoint, flush=True)
    engine, random = Engine(seed), Random(seed)
    for _ in range(steps) if steps else count():
        publisher.publish(EventBatch(time.time(), engine.step(random)))
        if not steps:
            time.sleep(0.0005)
    threading.Event().wait()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

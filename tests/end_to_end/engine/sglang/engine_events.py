"""SGLang's own publisher and events, for tests of ours. Runs in the engine's environment.

    python engine_events.py publish CONFIG RANK...
    python engine_events.py read ENDPOINT TOPIC COUNT

`publish` publishes each line of its input on every rank: `[ts, [[type, fields]…]]`. `read` prints COUNT batches, one a
line.
"""

import json
import sys

import msgspec
import zmq
from sglang.srt.disaggregation import kv_events


def publish(config: str, *ranks: str) -> None:
    publishers = [kv_events.EventPublisherFactory.create(config, int(rank)) for rank in ranks]
    print("ready", flush=True)
    for line in sys.stdin:
        ts, events = json.loads(line)
        for publisher in publishers:
            batch = [getattr(kv_events, kind)(**fields) for kind, fields in events]
            publisher.publish(kv_events.KVEventBatch(ts=ts, events=batch))
    for publisher in publishers:
        publisher.shutdown()


def read(endpoint: str, topic: str, count: str) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
    decoder = msgspec.msgpack.Decoder(type=kv_events.KVEventBatch)
    print("ready", flush=True)
    for _ in range(int(count)):
        _, number, payload = socket.recv_multipart()
        batch = decoder.decode(payload)
        print(json.dumps([int.from_bytes(number, "big"), msgspec.to_builtins(batch)]), flush=True)


if __name__ == "__main__":
    {"publish": publish, "read": read}[sys.argv[1]](*sys.argv[2:])

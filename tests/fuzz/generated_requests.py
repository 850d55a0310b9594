"""Generates HTTP requests that are nearly right: targets, heads, framings and JSON bodies, bent a little."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

from router.auth.engine_fields import CONTROL_FIELDS, CONTROL_HEADERS

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/m",
    "/v1/files",
    "/v1/files/a",
    "/v1/audio/transcriptions",
    "/invocations",
    "/generate",
    "/tokenize",
    "/health",
    "/metrics",
    "/match",
    "/query",
    "/query_by_hash",
    "/workers",
    "/sleep",
    "/v1/load_lora_adapter",
    "/server_info",
    "/update_weights_from_disk",
    "/collective_rpc",
    "/unknown",
]
METHODS = ["POST"] * 120 + [
    *("GET", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PRI", "QUERY"),
    *("post", "GE T", "SLEEP"),
]
_BENDS = [
    "..",
    ".",
    "%2e%2e",
    "%2E",
    "/",
    "//",
    "\\",
    "%2f",
    "%2F",
    "%5c",
    "%5C",
    "%00",
    "%C0%AE%C0%AE",
    "%C0%AF",
    "%E0%80%AF",
    "%2E%2e",
    "%c3%A9",
    "%EF%BC%8F",
    "%09",
    "%20",
    " ",
    "\t",
    "*",
    "@",
    "..;",
    "%",
    "%zz",
    "%25",
    ";",
    "?",
    "#",
    "é",
    "\x01",
]
_STEERING = [
    "kv_transfer_params",
    "rid",
    "bootstrap_host",
    "request_id",
    "r\\u0069d",
    "data_parallel_rank",
    "\\u006bv_transfer_params",
    *sorted(CONTROL_FIELDS),
]
_ODD_VALUES = [
    *("1", '{"a": 1}', "9" * 5000, "-0", "1E400", "1e-999", "NaN", "1e999", "01", "[" * 300),
    *('"\\u0000"', '"a\\/"', '"\\ud800"', '"\x01"', '{"a": 1, "a": 2}'),
]
_HEADERS = [
    "x-data-parallel-rank: 1",
    *(f"{name.decode()}: 1" for name in sorted(CONTROL_HEADERS)),
    "x_data_parallel_rank: 1",
    "X-Request-Id: a b",
    "Connection: x-request-id",
    "Connection: close, content-length",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: Chunked",
    "Transfer-Encoding:\tchunked",
    "Transfer-Encoding: xchunked",
    "Content-Length: 5",
    "Content-Length: +5",
    "Content-Length: 5, 5",
    "Content-Length: 0x5",
    "Expect: 100-continue",
    "Upgrade: h2c",
    "Connection: upgrade\r\nUpgrade: h2c",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Connection: close",
    "Connection: x-kvrouter-worker",
    "X-HTTP-Method-Override: DELETE",
    "Trailer: Content-Length",
    "TE: trailers",
    "Host: other",
    "Host:",
    "Content-Type: application/json; charset=utf-16",
    "Content-Encoding: gzip",
    "X: a\rb",
    "X: a\nTransfer-Encoding: chunked",
    "X : a",
    " folded",
    "X: a\x00b",
    ": none",
    "X: " + "a" * 300,
    "Connection: content-type",
    "Connection: host, x-data-parallel-rank, content-type",
    *(f"Connection: {name.decode()}" for name in sorted(CONTROL_HEADERS)),
    "Content-Type: application/x-www-form-urlencoded",
    "Content-Type: multipart/form-data; boundary=b",
    "Content-Type: text/plain",
    "Content-Encoding: identity",
    "Content-Encoding: identity, gzip",
    "Content_Length: 3",
    "Transfer_Encoding: chunked",
    "Authorization: Bearer x",
    "Authorization: Bearer\txa\xe9",
    "X-Api-Key: \xff",
    "Origin: null",
    "Origin: http://[",
    "Host: [",
    "Sec-Fetch-Site: cross-site",
    "Expect: 200-ok",
    "Range: bytes=0-",
    "If-None-Match: *",
    "Accept-Encoding: gzip, br",
    "traceparent: 00-" + "0" * 32 + "-" + "f" * 16 + "-01",
    "traceparent: \xff",
    "tracestate: " + "a=b," * 40,
    "X-Kvrouter-Explain: 1",
    "X-Kvrouter-Priority: " + "9" * 5000,
    *(
        f"{name}: {value}"
        for name in (
            *("X-Kvrouter-Priority", "X-Request-Timeout", "X-Envoy-Expected-Rq-Timeout-Ms", "X-Stainless-Timeout"),
            *("X-Slo-Ttft-Ms", "X-Slo-Tpot-Ms", "X-Kvrouter-Service-Level", "X-Session-Id"),
        )
        for value in ("1e9", "nan", "-inf", "1e999", "-1", "1_0e6", "\xb2", "")
    ),
]
# Heads that come again and again, as clients' libraries write them, up to their length and behind it.
_KNOWN_HEADS = [
    (b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n", b"\r\n\r\n"),
    (b"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n", b"\r\nX: y\r\n\r\n"),
    (b"POST /v1/messages?a=b HTTP/1.1\r\nHost: r\r\n", b"\r\nX-Request-Id: a\r\n\r\n"),
    (b"POST /generate HTTP/1.1\r\nContent-Type: text/plain\r\n", b"\r\nHost: r\r\n\r\n"),
    (b"POST /v1/embeddings HTTP/1.1\r\nHost: r\r\nX-Data-Parallel-Rank: 1\r\n", b"\r\n\r\n"),
]
_KNOWN_LENGTHS = [b"Content-Length: %d"] * 40 + [
    *(
        b"Content-Length: 0%d",
        b"Content-Length: %d ",
        b"Content-Length:%d",
        b"content-length: %d",
        b"Content-Length:\t%d",
    ),
    *(b"Content-Length: +%d", b"Content-Length: %d, %d", b"Content-Length: %d\r\nContent-Length: %d"),
    *(b"Content-Length : %d", b"Content-Length: %d\n", b"Content-Length: 9%d", b"Content-Length: -%d", b"X: %d"),
    *(b"Transfer-Encoding: chunked\r\nContent-Length: %d", b"Content-Length: 0x%x", b"Content-Length: %d\r\n x"),
]


def request_with_known_head(random: Random, number: int) -> bytes:
    """Return a request whose head differs from others only in its length. Its number is in its body."""
    before, after = random.choice(_KNOWN_HEADS)
    body = json_body(random)
    encoding = json.detect_encoding(body)
    with suppress(UnicodeDecodeError):
        text = body.decode(encoding)
        if text.startswith("{"):
            body = f'{{"#": {number}, {text[1:]}'.encode(encoding)
    form = random.choice(_KNOWN_LENGTHS)
    size = len(body) + random.choice([0] * 120 + [-1, 1])
    return before + form % ((size,) * form.count(b"%")) + after + body


def request(random: Random, number: int) -> bytes:
    """Return a random request, with its number in a header."""
    kind, body = form(random) if random.random() < 0.08 else ("", json_body(random))
    target = _target(random)
    if kind and random.random() < 0.8:
        target = random.choice(["/v1/audio/transcriptions", "/v1/files"])
    method = random.choice(METHODS)
    version = random.choice(["HTTP/1.1"] * 80 + ["HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1", "HTTP/1.1 "])
    lines = [f"{method} {target} {version}"]
    if random.random() < 0.99:
        lines.append("Host: r")
    lines.append(f"X-Fuzz: {number}")
    if kind:
        lines.append(f"Content-Type: {kind}")
    lines += random.choices(_HEADERS, k=random.choice([0] * 12 + [1, 1, 2]))
    framing = random.random()
    if framing < 0.8:
        lines.append(f"Content-Length: {len(body) + random.choice([0] * 120 + [-1, 1])}")
    elif framing < 0.98:
        lines.append("Transfer-Encoding: chunked")
        body = _chunked(random, body)
    end = random.choice(["\r\n"] * 150 + ["\n", "\r"])
    return (end.join(lines) + end + end).encode(random.choice(["utf-8", "utf-8", "latin-1"]), "replace") + body


def _target(random: Random) -> str:
    target = random.choice(PATHS if random.random() < 0.5 else PATHS[:5])
    if random.random() < 0.005:
        return random.choice([f"http://r{target}", "*", "r:80", f"//r{target}", f"?{target}", ""])
    for _ in range(random.choice([0] * 16 + [1, 1, 2])):
        place = random.randrange(len(target) + 1)
        match random.randrange(4):
            case 0:
                target = target[:place] + random.choice(_BENDS) + target[place:]
            case 1:
                target = target + "/" + random.choice(_BENDS) + random.choice(PATHS)
            case 2 if place < len(target):
                target = target[:place] + f"%{ord(target[place]) & 0xFF:02x}" + target[place + 1 :]
            case _:
                target += "?" + random.choice(_BENDS)
    return target


def _chunked(random: Random, body: bytes) -> bytes:
    place = random.randrange(len(body) + 1)
    parts = [part for part in (body[:place], body[place:]) if part]
    sizes = [random.choice(["%x"] * 60 + ["%X;a=b", "0%x", "0x%x", " %x", "%x "]) % len(part) for part in parts]
    chunks = b"".join(size.encode() + b"\r\n" + part + b"\r\n" for size, part in zip(sizes, parts, strict=True))
    return chunks + random.choice(
        [b"0\r\n\r\n"] * 40 + [b"0\r\nX: y\r\n\r\n", b"00\r\n\r\n", b"0\r\nContent-Length: 3\r\n\r\n"]
    )


def form(random: Random) -> tuple[str, bytes]:
    """A form, bent a little, and its content's type."""
    names = random.choices(
        ["model", "file", "x", *sorted(CONTROL_FIELDS)[:3], "vllm_xargs"], [9, 5, 5, 1, 1, 1, 1], k=2
    )
    if random.random() < 0.1:
        text = random.choice(["&", ";"]).join(f"{name}=%7b%22rid%22:1%7d" for name in names)
        return random.choice(["application/x-www-form-urlencoded", "text/plain"]), text.replace("rid", "r%69d").encode()
    boundary = random.choice(["b"] * 8 + ["b b", "", "b\r"])
    lines = [random.choice([""] * 20 + ["\r\n", "preamble\r\n", "\n"])]
    for name in names:
        named = random.choice(
            [f'name="{name}"'] * 12
            + [f"name={name}", f"name*=utf-8''{name.replace('i', '%69')}", f"name*0={name[:2]}; name*1={name[2:]}"]
            + [f'name="x"; name="{name}"', f'filename="\\"; name="{name}"', f"name = {name}", f'NAME="{name}"']
            + [f'name="{name}"; filename="x.wav"', f'\r\n name="{name}"']
        )
        value = random.choice(["m", '{"rid": 1}', "{", "\r\n--", "--b", "\r\n--b"])
        lines.append(f"--{boundary}\r\nContent-Disposition: form-data; {named}\r\n\r\n{value}\r\n")
    lines.append(random.choice([f"--{boundary}--\r\n"] * 12 + [f"--{boundary}--", "", f"--{boundary}--\r\nx"]))
    kind = random.choice(
        ["multipart/form-data; boundary={}"] * 20
        + ['multipart/form-data; boundary="{}"', "multipart/form-data; boundary*=utf-8''{}", "text/plain"]
        + [
            "multipart/form-data; boundary=x; boundary={}",
            "Multipart/Form-Data;boundary={}",
            "multipart/mixed; boundary={}",
        ]
    )
    return kind.format(boundary), "".join(lines).encode()


def json_body(random: Random) -> bytes:
    """A body that a worker would take, bent at the level of JSON's own grammar."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in _fields(random).items()]
    for _ in range(random.choice([0] * 8 + [1, 1, 2])):
        fields.insert(random.randrange(len(fields) + 1), _odd_field(random))
    text = "{" + ", ".join(fields) + "}"
    match random.randrange(40):
        case 0:
            return text.encode(random.choice(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"]))
        case 1:
            return text.encode() + random.choice([b"\x00", b"{}", b" ", b"\n", b",", b"//x"])
        case 2:
            place = random.randrange(len(text))
            return text[:place].encode() + bytes([random.randrange(256)]) + text[place + 1 :].encode()
        case 3:
            return text[: random.randrange(len(text))].encode()
    return text.encode()


def _fields(random: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": "m"}
    match random.randrange(9):
        case 0:
            fields["prompt"] = random.choice(
                ["x", [1, 2], [[1], [2]], ["a", "b"]] * 6 + [[], {}, None, 1, [1, "a"], [[1], "a"]]
            )
        case 1:
            content: Any = random.choice(["x", [{"type": "text", "text": "y"}]] * 6 + [None, [], [1], {}])
            fields["messages"] = [{"role": random.choice(["user", "system"] * 6 + [1]), "content": content}]
        case 2:
            fields["input"] = random.choice(["x", [{"role": "user", "content": "x"}]] * 6 + [[1], {}])
        case 3:
            fields["text"] = "x"
        case _:  # what any of the APIs takes
            fields |= {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x"}
    return fields | random.choice(
        [{}, {"stream": True}] * 3 + [{"priority": random.choice([" -9 ", -9, 0, 1e3])}, {"n": 10**20}]
    )


def _odd_field(random: Random) -> str:
    inside = random.choice(_ODD_VALUES)
    match random.randrange(4):
        case 0:
            return f'"{random.choice(_STEERING)}": {inside}'
        case 1:
            return f'"vllm_xargs": {{"{random.choice(_STEERING)}": {inside}}}'
        case 2:
            name = random.choice(["model", "m\\u006fdel", "messages", "x"])
            return f'"{name}": {inside}'
    return f'"x": {inside}'

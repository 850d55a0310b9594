"""Damaged snapshots and dumps, of peers too: an error of ours, or an index that is sound without what was damaged."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import msgspec
import pytest
from budget import damaged, examples
from xxhash import xxh3_64

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.dump import DumpedStream, DumpError, TargetDump, read_dump, write_dump
from indexer.index import UnknownModelError
from indexer.native import CORE_VARIABLE, CORES
from kvevents import BlockStored, EventBatch, EventSource, encode_batch

FEW = 150
NOWHERE = EventSource(0, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
PROMPT = list(range(1, 33))


def dumped() -> list[bytes]:
    """A dump of three streams that share prefixes."""
    indexer = Indexer()
    targets = [Target(f"w{number}", 0, "m", "acme" if number == 2 else "default") for number in range(3)]
    try:
        for number, target in enumerate(targets):
            indexer.register(Registration(target, NOWHERE, "vLLM", 2))
            stored = [
                BlockStored([1, 2, 3], None, PROMPT[:6], 2, medium="GPU"),
                BlockStored([4 + number], 3, PROMPT[6:8], 2, group_idx=number or None),
                BlockStored([b"x" * 32], 4, PROMPT[8:10], 2, medium="CPU", lora_name="sql"),
            ]
            indexer.index.apply_payload(target, encode_batch(EventBatch(1.0, list(stored), 0)))
        return list(write_dump([dump_of(indexer, target) for target in targets], ""))
    finally:
        indexer.stop()


def dump_of(indexer: Indexer, target: Target) -> TargetDump:
    return TargetDump(
        *(target.worker, target.dp_rank, target.model, target.tenant, "vLLM"),
        *(NOWHERE.endpoint, NOWHERE.replay_endpoint, "", 2, None, None, [2], DumpedStream(3, 1.0)),
        *indexer.index.dump(target),
    )


def changed(random: Random, lines: list[bytes]) -> list[bytes]:
    """Return the dump with damage, half of the time with a matching checksum, as an attacker would write it."""
    lines = list(lines)
    for _ in range(random.choice([1, 1, 2])):
        place = random.randrange(len(lines))
        line = lines[place]
        match random.randrange(6):
            case 0:
                lines[place] = damaged(random, line)
            case 1:
                del lines[place]
            case 2:
                lines.insert(place, line)
            case 3:
                number = random.choice([b"-1", b"0", b"1e400", b"NaN", b"18446744073709551616", b"null", b'"x"', b"[]"])
                digits = [at for at, byte in enumerate(line) if chr(byte).isdigit()]
                at = random.choice(digits) if digits else 0
                lines[place] = line[:at] + number + line[at + 1 :]
            case 4:
                lines[place] = line.replace(b"[", b"[[", 1).replace(b"]", b"]]", 1)
            case _:
                lines[place] = line.replace(b"tcp://127.0.0.1:9", random.choice([b"tcp://a:0;b:1", b"nonsense", b""]))
        if not lines:
            return lines
    if random.random() < 0.5:
        whole = [line.rstrip(b"\n") + b"\n" for line in lines[:-1]]
        end = {"kind": "end", "targets": len(whole) - 1, "checksum": xxh3_64(b"".join(whole)).hexdigest()}
        return [*whole, msgspec.json.encode(end) + b"\n"]
    return lines


@pytest.mark.parametrize("core", CORES)
def test_damaged_dump_leaves_consistent_index(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORE_VARIABLE, core)
    lines, read = dumped(), 0
    assert len(read_dump(lines, "")) == 3
    for random in examples(FEW, 1 / len(CORES)):
        given = changed(random, lines)
        try:
            saved = read_dump(given, "")
        except DumpError:
            continue
        read += 1
        indexer = Indexer()
        try:
            indexer.use_dump(saved)
            indexer.register_saved()
            with suppress(UnknownModelError):
                indexer.match(MatchQuery("m", PROMPT))
                indexer.longest(MatchQuery("m", PROMPT))
            indexer.index.check_integrity()
            for known in indexer.registered():
                indexer.report(known.target)
                again = [dump_of(indexer, known.target)]
                assert [each.whole() for each in read_dump(write_dump(again, ""), "")] == again, given
        finally:
            indexer.stop()
    assert read

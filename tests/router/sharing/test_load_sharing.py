"""Load shared between routers: what each knows of the others, whatever is lost, late or dead."""

from __future__ import annotations

import asyncio
import math
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from manual_clock import Clock
from waiting import until

from http_api.errors import RequestError
from indexer import Target
from router.apis.response_owners import ResponseOwners
from router.auth import AccessControl
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.load.load_messages import SHARED_TOKENS, Kind, Message, RankLoad, SentPrompt, decode, encode
from router.load.target_load import PREFILL_SHARE, LoadTable, ReservedLoad
from router.settings import TenantSettings, TenantsSettings
from router.sharing import LoadSharing, PeerLoad, SharingChannel
from router.sharing.channels import DatagramChannel

EXPIRY = 3.0
LINGER = 1.0


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def here(wire: Wire, clock: Clock) -> LoadSharing:
    """The sharing of a router that sends its messages over `wire`."""
    return sharing_of(LoadTable(), PeerLoad(EXPIRY, LINGER, clock), [wire])


@pytest.fixture
def there(clock: Clock) -> PeerLoad:
    """The load that another router knows of its peers."""
    return PeerLoad(EXPIRY, LINGER, clock)


def sharing_of(table: LoadTable, peer_load: PeerLoad, channels: list[SharingChannel]) -> LoadSharing:
    """Return the sharing of a table's load, subscribed to its changes."""
    sharing = LoadSharing(table, peer_load, channels)
    table.on_change.append(sharing.changed)
    return sharing


class Wire:
    """A carrier whose messages a test hands on, or loses."""

    name = "wire"

    def __init__(self) -> None:
        self.interval = 0.0
        self.problem: str | None = None
        self.told: list[bytes] = []

    def send(self, message: bytes) -> None:
        self.told.append(message)

    async def flush(self) -> None:
        pass

    async def run(self, _receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        connected()
        await asyncio.Event().wait()


def hear_all(here: LoadSharing, wire: Wire, there: PeerLoad) -> None:
    """Send everything, and receive it there."""
    here.send_everything()
    for message in wire.told:
        there.apply(decode(message))
    wire.told.clear()


def load_of(worker: str, requests: int, pending: int = 0, rank: int = 0, backlog: float = 0.0) -> RankLoad:
    return RankLoad(worker, rank, requests, pending, 10 * requests, requests, 0, backlog)


def news(router: str, number: int, *loads: RankLoad) -> Message:
    return Message(router, number, Kind.NEWS, list(loads))


async def test_what_live_sessions_need_is_shared_until_they_end(
    here: LoadSharing, wire: Wire, there: PeerLoad, clock: Clock
) -> None:
    table, live = here._table, {("w", 0): 700.0}
    table.live_of = lambda *rank: live.get(rank, 0.0)
    table.of("w", 0), table.of("idle", 0)
    hear_all(here, wire, there)
    assert (there.live_tokens("w", 0), there.live_tokens("idle", 0)) == (700, 0)
    live["w", 0] = 500.0
    clock.now += EXPIRY / 3
    hear_all(here, wire, there)
    assert there.live_tokens("w", 0) == 500
    live.clear()
    clock.now += EXPIRY + 0.1
    hear_all(here, wire, there)
    there.expire()
    assert there.live_tokens("w", 0) == 0


async def test_the_session_of_a_prompt_is_shared(here: LoadSharing, wire: Wire, there: PeerLoad) -> None:
    seen: list[SentPrompt] = []
    there.on_session.append(seen.append)
    hashes = array("Q", range(1, 4 * 16 + 1))
    for session in (7, 0):
        here.sent(Target("w", 0, "m"), hashes, session, tokens=1030)
        hear_all(here, wire, there)
    assert [(each.session, each.tokens, each.worker, len(each.prefixes)) for each in seen] == [(7, 1030, "w", 64)]


async def test_an_ended_session_ends_at_every_router_once(here: LoadSharing, wire: Wire, clock: Clock) -> None:
    other, seen = sharing_of(LoadTable(), PeerLoad(EXPIRY, LINGER, clock), [Wire()]), list[str]()
    other.on_finished.append(seen.append)
    here.on_finished.append(seen.append)
    here.share_finished("séance")
    for _ in range(2):
        here.send_everything()
    for message in wire.told:
        other.receive(message)
        here.receive(message)
    assert seen == ["séance"]


async def test_limits_are_divided_while_routers_may_be_unheard(here: LoadSharing, wire: Wire, clock: Clock) -> None:
    here.peer_load.expiry = 0.03
    here.start()
    try:
        for number in range(3):
            here.peer_load.apply(news(f"other {number}", 1))
        await until(lambda: here._routers == 4)
        assert here.parts() == 1
        wire.problem = "it is cut"
        assert here.parts() == 1  # all of them were heard a moment ago
        clock.now += EXPIRY + 0.1
        here.peer_load.apply(news("other 0", 2))  # over another channel
        here.peer_load.expire()
        assert here.parts() == 2
        wire.problem = None
        assert here.parts() == 1
    finally:
        await here.kill()


class OthersAreForgotten(RuleBasedStateMachine):
    """Peer load, compared with a plain table of the latest message of each router."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(0.0)
        self.peer_load = PeerLoad(EXPIRY, LINGER, self.clock)
        self.told: dict[tuple[str, str], tuple[RankLoad, float]] = {}
        self.heard: dict[str, float] = {}
        self.numbers = dict.fromkeys("abc", 0)

    @rule(router=st.sampled_from("abc"), worker=st.sampled_from("xy"), requests=st.integers(0, 5), late=st.booleans())
    def tell(self, router: str, worker: str, requests: int, late: bool) -> None:
        self.numbers[router] += 1
        number = self.numbers[router]
        self.peer_load.apply(news(router, number, load_of(worker, requests)))
        if late:  # one that was overtaken
            self.peer_load.apply(news(router, number - 1, load_of(worker, 99)))
        self.told[router, worker] = (load_of(worker, requests), self.clock.now)
        self.heard[router] = self.clock.now

    @rule(router=st.sampled_from("abc"))
    def say_goodbye(self, router: str) -> None:
        self.peer_load.apply(Message(router, self.numbers[router] + 1, Kind.GONE))
        self.numbers[router] += 1
        self._forget(router)

    @precondition(lambda self: self.told)
    @rule(seconds=st.floats(0.1, 4))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.peer_load.expire()
        for router, heard in list(self.heard.items()):
            if heard < self.clock.now - EXPIRY:
                self._forget(router)
        self.told = {key: known for key, known in self.told.items() if known[1] >= self.clock.now - EXPIRY}

    def _forget(self, router: str) -> None:
        self.heard.pop(router, None)
        self.told = {key: known for key, known in self.told.items() if key[0] != router}

    @invariant()
    def sums_are_right(self) -> None:
        assert set(self.peer_load.routers()) == set(self.heard)
        for worker in "xy":
            known = [load for (_, url), (load, _) in self.told.items() if url == worker]
            now = self.peer_load.of(worker, 0)
            assert now.requests == sum(load.requests for load in known)
            assert now.context == sum(load.context for load in known)
            assert self.peer_load.in_flight(worker, [0])[0] == now.requests


TestOthersAreForgotten = OthersAreForgotten.TestCase
TestOthersAreForgotten.settings = settings(max_examples=40, stateful_step_count=25)


STEP = st.sampled_from(["begin", "first", "end"])


@given(st.lists(st.tuples(st.sampled_from("xy"), STEP, st.booleans()), max_size=40))
@settings(max_examples=60)
async def test_peers_learn_loads_despite_lost_messages(steps: list[tuple[str, str, bool]]) -> None:
    clock, wire, table = Clock(0.0), Wire(), LoadTable()
    here = sharing_of(table, PeerLoad(EXPIRY, LINGER, clock), [wire])
    there = PeerLoad(EXPIRY, LINGER, clock)
    held: list[ReservedLoad] = []
    for worker, step, arrives in steps:
        if step == "begin":
            held.append(ReservedLoad(table.of(worker, 0), 7, 20))
        elif held:
            held[-1].first_byte() if step == "first" else held.pop().release()
        await asyncio.sleep(0.001)
        if arrives:
            for message in wire.told:
                there.apply(decode(message))
        wire.told.clear()
    clock.now += EXPIRY + 1
    here.send_everything()
    for message in wire.told:
        there.apply(decode(message))
    there.expire()
    for worker in "xy":
        own, known = table.of(worker, 0), there.of(worker, 0)
        for amount in ("requests", "pending", "context", "waiting"):
            assert getattr(known, amount) == getattr(own, amount)


async def test_prompts_of_peers_are_in_flight_prefixes_until_their_end(
    here: LoadSharing, there: PeerLoad, wire: Wire, clock: Clock
) -> None:
    target = Target("http://w", 1, "m")
    prompt = array("Q", range(1, 41))  # 40 chunks: 5 prefixes are sent
    ended = here.sent(target, prompt)
    hear_all(here, wire, there)
    assert there.overlaps(prompt).get(target, 0) == 5 * SHARED_TOKENS
    sibling = array("Q", [*prompt[:20], *range(100, 120)])
    assert there.overlaps(sibling).get(target, 0) == 2 * SHARED_TOKENS <= 20 * CHUNK_TOKENS
    assert there.overlaps(prompt).get(Target("http://other", 1, "m"), 0) == 0
    ended()
    ended()  # only once
    hear_all(here, wire, there)
    assert there.overlaps(prompt).get(target, 0) == 5 * SHARED_TOKENS
    clock.now += LINGER
    assert there.overlaps(prompt).get(target, 0) == 0


async def test_failed_prompt_of_a_peer_is_dropped(here: LoadSharing, there: PeerLoad, wire: Wire) -> None:
    target, other = Target("http://w", 0, "m"), Target("http://v", 0, "m")
    prompt = array("Q", range(1, 9))
    for ended, failed in [(here.sent(target, prompt), True), (here.sent(other, prompt), False)]:
        hear_all(here, wire, there)
        ended(failed)
        hear_all(here, wire, there)
    assert there.overlaps(prompt) == {other: SHARED_TOKENS}


async def test_prompt_with_a_lost_end_is_dropped_by_the_next_message(
    here: LoadSharing, there: PeerLoad, wire: Wire, clock: Clock
) -> None:
    target, prompt = Target("http://w", 0, "m"), array("Q", range(1, 9))
    ended = here.sent(target, prompt)
    hear_all(here, wire, there)
    ended()
    here.send_everything()
    wire.told.clear()  # lost
    hear_all(here, wire, there)
    clock.now += LINGER
    assert there.overlaps(prompt).get(target, 0) == 0


async def test_prompts_of_a_removed_router_are_dropped(
    here: LoadSharing, there: PeerLoad, wire: Wire, clock: Clock
) -> None:
    target, prompt = Target("http://w", 0, "m"), array("Q", range(1, 9))
    here.sent(target, prompt)
    here.start()
    await asyncio.sleep(0.01)
    await here.stop()
    for message in wire.told:
        there.apply(decode(message))
    assert there.routers() == []
    clock.now += LINGER
    assert there.overlaps(prompt).get(target, 0) == 0


def test_backlogs_elsewhere_pass_with_time(there: PeerLoad, clock: Clock) -> None:
    there.apply(news("a", 1, load_of("w", 1, backlog=2.0)))
    there.apply(news("b", 1, load_of("w", 1, backlog=0.5)))
    assert there.backlog("w", 0) == 2.5
    clock.now = 1.0
    assert there.backlog("w", 0) == 1.0


async def test_invalid_messages_are_ignored(here: LoadSharing) -> None:
    odd = [load_of("w", -5), load_of("w", 2**60), load_of("w", 5, backlog=math.nan), load_of("w", 5, rank=-1)]
    for data in (
        *(b"", b"nonsense", encode([1, 2, 3]), encode(news(here.router, 1, load_of("w", 5)))),
        encode(news("\x01", 1, load_of("w", 5))).replace(b"\x01", b"\xff", 1),  # no UTF-8
        *(encode(news("a", 1, load)) for load in odd),
        encode(Message("a", 1, Kind.NEWS, spent=[("t", 0, -5)])),
    ):
        here.receive(data)
    assert here.peer_load.routers() == []


def test_repeated_prompt_is_held_once() -> None:
    peers, hashes = PeerLoad(EXPIRY, 0.0), array("Q", range(8))
    for number in (1, 2):
        sent = SentPrompt(7, "w", 0, "m", hashes[7:].tobytes())
        peers.apply(Message("a", number, Kind.NEWS, sent=[sent]))
    assert peers.overlaps(hashes) == {Target("w", 0, "m"): SHARED_TOKENS}
    peers.apply(Message("a", 3, Kind.NEWS, ended=[7]))
    assert peers.overlaps(hashes) == {}


def test_each_load_has_the_load_of_other_routers_there_and_drops_it_with_them() -> None:
    table, peers = LoadTable(), PeerLoad(EXPIRY, LINGER)
    LoadSharing(table, peers, [])
    known = table.of("w", 0)
    peers.apply(
        Message("a", 1, Kind.NEWS, [RankLoad("w", 0, 2, 40, 50, 1, 0, 0.0), RankLoad("new", 0, 3, 0, 9, 0, 0, 0.0)])
    )
    assert (known.peers.requests, known.peers.context, table.of("new", 0).peers.requests) == (2, 50, 3)
    peers.apply(Message("b", 1, Kind.NEWS, [RankLoad("w", 0, 4, 0, 1, 0, 0, 0.0)]))
    assert known.peers.requests == 6
    peers.apply(Message("b", 2, Kind.GONE))
    peers.apply(Message("a", 2, Kind.GONE))
    assert (known.peers.requests, table.of("new", 0).peers.requests) == (0, 0)


def test_memory_and_prefills_of_other_routers_count_in_the_limit_and_the_pace() -> None:
    clock = Clock()
    table = LoadTable(clock)
    peers = PeerLoad(EXPIRY, LINGER, clock)
    LoadSharing(table, peers, [])
    known = table.of("w", 0)
    ReservedLoad(known, 10, 10, 0.3)
    first = RankLoad("w", 0, 1, 40, 50, 1, 0, 0.0, memory=90, prefill=300)
    peers.apply(Message("a", 1, Kind.NEWS, [first]))
    assert known.held == 10 + 90
    paced_until = clock.now + 0.6 / PREFILL_SHARE
    assert known.paced_until == pytest.approx(paced_until)
    clock.now += 0.5
    peers.apply(Message("a", 2, Kind.NEWS, [first]))  # no prompt was sent since
    assert known.paced_until == pytest.approx(paced_until)
    peers.apply(Message("b", 1, Kind.NEWS, [RankLoad("w", 0, 1, 40, 50, 1, 0, 0.0)]))  # it does not know its memory
    assert known.held == 10 + 90 + 50


async def test_lost_channel_is_only_a_finding() -> None:
    wire, table = Wire(), LoadTable()
    sharing = sharing_of(table, PeerLoad(EXPIRY, LINGER), [wire])
    wire.problem = "connection refused"
    ReservedLoad(table.of("w", 0), 7, 20).release()
    sharing.send_everything()
    assert wire.told == []
    [found] = sharing.findings()
    assert found == {"finding": "load_not_shared", "carrier": "wire", "detail": "connection refused"}


def test_processes_of_a_machine_share_loads_and_survive_a_crash() -> None:
    async def play(folder: Path) -> None:
        tables = [LoadTable() for _ in range(3)]
        sharing = [
            sharing_of(table, PeerLoad(0.3, LINGER), [DatagramChannel(folder, number, 3)])
            for number, table in enumerate(tables)
        ]
        for each in sharing:
            each.start()
        held = ReservedLoad(tables[0].of("w", 0), 7, 20)
        ReservedLoad(tables[1].of("w", 0), 5, 10)
        await until(lambda: sharing[2].peer_load.of("w", 0).pending == 12)
        await until(lambda: sharing[0].peer_load.of("w", 0).requests == 1)
        held.release()
        await until(lambda: sharing[2].peer_load.of("w", 0).requests == 1)
        await sharing[1].kill()
        await until(lambda: sharing[2].peer_load.of("w", 0).requests == 0)
        again = sharing_of(tables[1], PeerLoad(0.3, LINGER), [DatagramChannel(folder, 1, 3)])
        again.start()  # a process that takes the place of a dead one
        await until(lambda: sharing[2].peer_load.of("w", 0).requests == 1)
        for each in (sharing[0], sharing[2], again):
            await each.stop()
        assert again.peer_load.routers() == []

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_waiting_requests_wake_when_peer_load_falls(here: LoadSharing) -> None:
    told: list[int] = []
    here.on_update.append(lambda: told.append(here.peer_load.of("w", 0).requests))
    here.receive(encode(news("a", 1, load_of("w", 2))))
    here.receive(encode(news("a", 2, load_of("w", 1))))
    here.receive(encode(Message("a", 3, Kind.GONE)))
    assert told == [2, 1, 0]


async def test_rates_of_tenants_hold_for_all_routers_together_and_count_once() -> None:
    limits = TenantSettings(keys=["0" * 64], requests_per_second=4)
    wires = [Wire(), Wire()]
    wires[1].interval = 1.0  # a slower way for the same
    tenants = TenantsSettings(named={"t": limits})
    here, there = (sharing_of(LoadTable(), PeerLoad(EXPIRY, LINGER), ways) for ways in (wires, []))
    controls = [AccessControl(tenants, "token") for _ in range(2)]
    for control, sharing in zip(controls, (here, there), strict=True):
        control.share_spent(sharing.spent)
        sharing.on_spent.append(control.spent_elsewhere)
    asks, also = (control.tenant("t") for control in controls)
    for _ in range(3):
        asks.admit("m", 10)
    here.send_everything()
    for wire in wires:
        for message in wire.told:
            there.receive(message, wire.interval)
    also.admit("m", 10)
    with pytest.raises(RequestError) as refused:
        also.admit("m", 10)
    assert refused.value.status == 429


async def test_response_of_another_router_is_found() -> None:
    wire = Wire()
    here, there = (sharing_of(LoadTable(), PeerLoad(EXPIRY, LINGER), ways) for ways in ([wire], []))
    mine, theirs = ResponseOwners(), ResponseOwners()
    mine.on_learned.append(here.share_response)
    there.on_response.append(theirs.remember)
    mine.learn(b'{"id": "resp_1", ', "http://w")
    here.send_everything()
    for message in wire.told:
        there.receive(message)
    assert theirs.get("resp_1") == "http://w"


@pytest.mark.parametrize("prefixes", [b"1234567", b"12345678" * 2000])
def test_invalid_prefixes_are_not_held(there: PeerLoad, prefixes: bytes) -> None:
    there.apply(Message("a", 1, Kind.NEWS, sent=[SentPrompt(1, "w", 0, "m", prefixes)]))
    assert there.overlaps(array("Q", [int.from_bytes(b"12345678", "little")] * 8)).get(Target("w", 0, "m"), 0) == 0

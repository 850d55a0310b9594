"""Sessions of agents: what is charged, when the gate closes, which calls wait, and that nothing leaks."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import Target
from router.load.load_messages import SentPrompt, shared_hashes
from router.programs import Call, Gate, RankCapacity
from router.programs.gate import LITTLE_LOST, ROOM
from router.programs.records import SessionKey
from router.programs.sessions import FORGOTTEN_SECONDS, LONGEST_IDLE, SHORTEST_IDLE
from router.programs.working_sets import MARK_TOKENS, marks_of

A, B, C = Target("http://a", 0, "m"), Target("http://b", 0, "m"), Target("http://c", 0, "m")
CAPACITY = 1000 * MARK_TOKENS


class Fleet:
    """A gate over two targets, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.reporting = {A, B}
        self.gate = Gate(lambda: self.now, self.reporting.__contains__)

    def arrives(self, name: str, marks: int, final: bool = False) -> Call:
        call = self.gate.sessions.call(key(name), marks * MARK_TOKENS, final)
        assert call is not None
        return call

    def turn(self, name: str, marks: int, target: Target = A, output: int = 0, final: bool = False) -> None:
        """Send one call and answer it."""
        call = self.arrives(name, marks, final)
        self.gate.passes(call, hashes(name, marks), best_overlap=marks * MARK_TOKENS, waiting=False)
        self.gate.sent(call, target, hashes(name, marks))
        call.output = output
        call()

    def close(self) -> None:
        """Let a session lose its context, which closes the gate."""
        self.turn("lost", 100)
        self.gate.passes(self.arrives("lost", 100), hashes("lost", 100), best_overlap=0, waiting=True)
        assert self.gate.closed


def key(name: str) -> SessionKey:
    return ("", "m", None, name)


def hashes(name: str, marks: int) -> array[int]:
    """Return the hashes of a prompt's chunks, of which 16 have one mark."""
    return array("Q", [hash((name, number)) % 2**64 for number in range(16 * marks)])


def context(name: str, marks: int) -> array[int]:
    return marks_of(hashes(name, marks))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_nothing_waits_while_no_context_is_lost(fleet: Fleet) -> None:
    fleet.turn("a", 900)
    new = fleet.arrives("b", 900)
    assert not fleet.gate.closed
    assert fleet.gate.passes(new, hashes("b", 900), best_overlap=0, waiting=False)


def test_lost_contexts_close_the_gate_until_nothing_waits_and_little_is_lost(fleet: Fleet) -> None:
    fleet.close()
    fleet.now += 600
    fleet.gate.passes(fleet.arrives("b", 10_000), hashes("b", 10_000), best_overlap=0, waiting=True)
    assert fleet.gate.closed
    fleet.gate.passes(fleet.arrives("c", 10), hashes("c", 10), best_overlap=0, waiting=False)
    assert not fleet.gate.closed


def test_cold_returns_and_new_sessions_wait_and_warm_returns_do_not(fleet: Fleet) -> None:
    fleet.turn("a", 500)
    fleet.close()
    held = 500 * MARK_TOKENS
    returns = fleet.arrives("a", 510)
    assert fleet.gate.passes(returns, hashes("a", 510), best_overlap=held - LITTLE_LOST, waiting=True)
    assert not fleet.gate.passes(returns, hashes("a", 510), best_overlap=held - LITTLE_LOST - 1, waiting=True)
    assert not fleet.gate.passes(fleet.arrives("new", 1), hashes("new", 1), best_overlap=0, waiting=True)


def test_a_session_with_a_call_in_flight_never_waits(fleet: Fleet) -> None:
    fleet.close()
    first = fleet.arrives("a", 50)
    fleet.gate.sent(first, A, hashes("a", 50))
    assert fleet.gate.passes(fleet.arrives("a", 60), hashes("a", 60), best_overlap=0, waiting=True)


def test_what_a_silent_target_holds_is_unknown_and_not_lost(fleet: Fleet) -> None:
    fleet.turn("a", 500)
    fleet.close()
    fleet.reporting.clear()
    assert fleet.gate.passes(fleet.arrives("a", 500), hashes("a", 500), best_overlap=0, waiting=True)


def test_room_is_what_live_sessions_leave_of_the_cache(fleet: Fleet) -> None:
    fleet.turn("a", 500)
    most = int(ROOM * 1000) - 500
    assert fleet.gate.has_room(RankCapacity(A, CAPACITY), context("b", most))
    assert not fleet.gate.has_room(RankCapacity(A, CAPACITY), context("b", most + 1))
    assert fleet.gate.has_room(RankCapacity(A, CAPACITY), context("a", 500 + most))  # what is its own counts once
    ranks = [RankCapacity(A, CAPACITY), RankCapacity(B, CAPACITY)]
    assert fleet.gate.without_room(ranks, hashes("b", most + 1)) == {("http://a", 0)}


def test_equal_prompts_of_a_group_are_charged_once(fleet: Fleet) -> None:
    fleet.close()
    group = [fleet.arrives(f"rollout {number}", 600) for number in range(8)]
    rank, prompt = RankCapacity(B, CAPACITY), hashes("group", 600)
    for call in group:
        assert not fleet.gate.passes(call, prompt, best_overlap=0, waiting=True)
        assert fleet.gate.has_room(rank, marks_of(prompt))
        fleet.gate.sent(call, B, prompt)
    assert fleet.gate.sessions.working_sets[B].tokens == 600 * MARK_TOKENS
    assert not fleet.gate.has_room(rank, context("other", 600))
    for call in group:
        call()
        fleet.gate.sessions.drop(call.session.number)
    assert fleet.gate.sessions.working_sets[B].tokens == 0


def test_a_session_that_goes_on_after_its_final_call_is_a_new_one(fleet: Fleet) -> None:
    fleet.turn("liar", 300, final=True)
    fleet.close()
    again = fleet.arrives("liar", 320)
    assert fleet.gate.sessions.state(again.session) == "new"
    assert not fleet.gate.passes(again, hashes("liar", 320), best_overlap=300 * MARK_TOKENS, waiting=True)


def test_a_target_without_live_sessions_has_room_for_any_context(fleet: Fleet) -> None:
    assert fleet.gate.has_room(RankCapacity(A, CAPACITY), context("a", 5000))
    fleet.turn("a", 500)
    assert fleet.gate.has_room(RankCapacity(A, None), context("b", 5000))  # its capacity is not known
    fleet.now += LONGEST_IDLE + 1
    assert not fleet.gate.without_room([RankCapacity(A, CAPACITY)], hashes("b", 5000))


def test_the_answer_counts_until_the_next_prompt_has_it(fleet: Fleet) -> None:
    fleet.turn("a", 10, output=5 * MARK_TOKENS)
    assert fleet.gate.sessions.working_sets[A].tokens == 15 * MARK_TOKENS
    fleet.turn("a", 16)
    assert fleet.gate.sessions.working_sets[A].tokens == 16 * MARK_TOKENS
    assert fleet.gate.sessions.turn > 0


def test_sessions_of_other_routers_and_the_parts_of_unheard_ones_leave_less_room() -> None:
    elsewhere, parts = {"http://a": 300.0 * MARK_TOKENS}, 1.0
    gate = Gate(lambda: 1000.0, lambda _: True, lambda worker, _: elsewhere.get(worker, 0.0), lambda: parts)
    a, b = RankCapacity(A, CAPACITY), RankCapacity(B, CAPACITY)
    assert gate.has_room(a, context("a", 500))
    assert not gate.has_room(a, context("a", 501))
    assert gate.has_room(b, context("a", 900))  # it has no session of any router
    call = gate.sessions.call(key("b"), 300 * MARK_TOKENS, False)
    assert call is not None
    gate.sent(call, B, hashes("b", 300))
    parts = 2.0
    assert gate.has_room(b, context("a", 100))
    assert not gate.has_room(b, context("a", 101))


def test_a_pair_is_charged_at_both_workers_and_counts_as_one_session(fleet: Fleet) -> None:
    sessions = fleet.gate.sessions
    for marks, prefill in ((100, C), (110, C), (120, B), (130, None)):
        call = fleet.arrives("a", marks)
        fleet.gate.sent(call, A, hashes("a", marks), prefill)
        call.output = 2 * MARK_TOKENS
        call()
        charged = {target: each.tokens // MARK_TOKENS for target, each in sessions.working_sets.items() if each.tokens}
        assert charged == {A: marks + 2} | ({} if prefill is None else {prefill: marks})
        assert sessions.live() == {"m": 1}
    fleet.turn("a", 140)
    call = fleet.arrives("a", 150)
    fleet.gate.sent(call, A, hashes("a", 150), C)
    sessions.forget({C})
    assert not sessions.needs("http://c", 0)
    fleet.gate.sent(fleet.arrives("b", 60), A, hashes("b", 60), C)
    sessions.forget({A})
    assert not any(each.tokens for each in sessions.working_sets.values())
    assert sessions.live() == {}


def test_an_idle_session_leaves_after_the_learned_pause(fleet: Fleet) -> None:
    for _ in range(40):
        fleet.turn("a", 10)
        fleet.now += 2
    assert fleet.gate.sessions.live().total() == 1
    fleet.now += SHORTEST_IDLE
    fleet.gate.sessions.expire()
    assert fleet.gate.sessions.live().total() == 0


def test_a_name_of_many_callers_is_no_session(fleet: Fleet) -> None:
    calls = [fleet.arrives("shared", 100) for _ in range(6)]
    for number, call in enumerate(calls):
        fleet.gate.sent(call, A, hashes(f"caller {number}", 100))
    assert fleet.gate.sessions.call(key("shared"), 10, False) is None
    assert fleet.gate.sessions.live().total() == 0
    for call in calls:
        call()
    assert fleet.gate.sessions.working_sets[A].tokens == 0


def test_a_session_ends_with_its_final_call_or_when_it_is_finished(fleet: Fleet) -> None:
    fleet.turn("a", 10, final=True)
    fleet.turn("b", 10)
    fleet.gate.sessions.finish("b")
    assert len(fleet.gate.sessions) == 0
    assert fleet.gate.sessions.working_sets[A].tokens == 0


def test_sessions_of_a_target_that_goes_are_cold_and_bound_to_no_target(fleet: Fleet) -> None:
    fleet.turn("a", 300)
    running = fleet.arrives("b", 300)
    fleet.gate.sent(running, A, hashes("b", 300))
    fleet.gate.sessions.forget({A})
    running()
    assert A not in fleet.gate.sessions.working_sets
    fleet.close()
    assert not fleet.gate.passes(fleet.arrives("a", 300), hashes("a", 300), best_overlap=0, waiting=True)


def test_ten_thousand_programs_that_vanish_leave_nothing(fleet: Fleet) -> None:
    for number in range(10_000):
        call = fleet.arrives(str(number), 3)
        fleet.gate.sent(call, A if number % 2 else B, hashes(str(number), 3))
        call(failed=number % 3 == 0)
        fleet.now += 0.01
    fleet.now += FORGOTTEN_SECONDS + LONGEST_IDLE
    fleet.gate.sessions.expire()
    sessions = fleet.gate.sessions
    assert (len(sessions), sessions.live().total(), sessions._marks) == (0, 0, 0)
    assert [len(sessions._named), len(sessions._live_programs), len(sessions._idle)] == [0, 0, 0]
    for target, each in sessions.working_sets.items():
        assert (each.tokens, each.announced, each.sessions, sessions.needs(*target[:2])) == (0, 0, 0, 0)


def test_a_hundred_calls_at_once_of_one_session_pass_and_leave_one_charge(fleet: Fleet) -> None:
    fleet.turn("a", 100)
    fleet.close()
    fleet.gate.sessions.finish("lost")
    calls = [fleet.arrives("a", 100 + number) for number in range(100)]
    for number, call in enumerate(calls):
        assert fleet.gate.passes(call, hashes("a", 100 + number), best_overlap=100 * MARK_TOKENS, waiting=True)
        fleet.gate.sent(call, A if number % 2 else B, hashes("a", 100 + number))
    for call in reversed(calls):
        call()
    sessions = fleet.gate.sessions
    assert sessions.state(calls[0].session) == "idle"
    assert sessions.live() == {"m": 1}
    assert sorted(each.tokens // MARK_TOKENS for each in sessions.working_sets.values()) == [0, 199]


def test_names_of_any_size_and_number_take_bounded_memory(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.programs.sessions._MOST_SESSIONS", 100)
    sessions = fleet.gate.sessions
    for number in range(5000):
        tenant = "crowd" if number % 10 else "other"
        call = sessions.call((tenant, "m", None, f"{number}"), MARK_TOKENS, False, program=f"run {number}")
        assert call is not None
        fleet.gate.sent(call, A, hashes(f"{number}", 1))
        if number % 3:
            call()
    assert len(sessions) == len(sessions._named) == 100
    assert len(sessions._live_programs) == sessions.live().total() == 100
    assert len(sessions._idle) <= 2 * 100 + 1


STEPS = st.tuples(st.sampled_from(["arrive", "send", "end", "fail", "wait", "finish", "forget"]), st.integers(0, 5))


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=60))
def test_charges_are_those_of_live_sessions_whatever_happens(steps: list[tuple[str, int]]) -> None:
    fleet = Fleet()
    sessions = fleet.gate.sessions
    arrived, sent = list[Call](), list[Call]()
    for step, number in steps:
        name = str(number % 3)
        if step == "arrive" and (call := fleet.gate.sessions.call(key(name), number * MARK_TOKENS, number == 5)):
            arrived.append(call)
        elif step == "send" and arrived:
            call = arrived.pop(number % len(arrived))
            call.output = number
            fleet.gate.sent(call, A if number % 2 else B, hashes(call.session.name, number))
            sent.append(call)
        elif step in ("end", "fail") and sent:
            sent.pop(number % len(sent))(step == "fail")
        elif step == "wait":
            fleet.now += 20.0 * number
            sessions.expire()
        elif step == "finish":
            sessions.finish(name)
        elif step == "forget":
            sessions.forget({A})
        assert all(each.tokens >= 0 and each.sessions >= 0 for each in sessions.working_sets.values())
    for call in sent:
        call()
    fleet.now += FORGOTTEN_SECONDS + LONGEST_IDLE
    sessions.expire()
    assert len(sessions) == sessions.live().total() == 0
    assert not any(each.tokens for each in sessions.working_sets.values())


def test_a_prompt_that_was_not_computed_is_no_context(fleet: Fleet) -> None:
    fleet.turn("a", 100)
    failed = fleet.arrives("a", 400)
    fleet.gate.sent(failed, B, hashes("a", 400))
    failed(failed=True)
    fleet.gate.passes(fleet.arrives("a", 400), hashes("a", 400), best_overlap=100 * MARK_TOKENS, waiting=False)
    assert fleet.gate.lost_tokens == 0
    new = fleet.arrives("b", 100)
    fleet.gate.sent(new, A, hashes("b", 100))
    new(failed=True)
    assert not fleet.arrives("b", 100).session.begun


def test_a_prompt_that_leaves_its_context_lost_nothing(fleet: Fleet) -> None:
    fleet.turn("a", 500)
    compacted = array("Q", [*hashes("a", 40), *hashes("summary", 60)])
    fleet.gate.passes(fleet.arrives("a", 100), compacted, best_overlap=40 * MARK_TOKENS, waiting=False)
    assert (fleet.gate.lost_tokens, fleet.gate.cold_returns) == (0, 0)


def test_unlike_prompts_of_one_name_pass_in_the_place_of_the_one_before(fleet: Fleet) -> None:
    fleet.turn("a", 100)
    fleet.close()
    assert fleet.gate.passes(fleet.arrives("a", 100), hashes("other", 100), best_overlap=0, waiting=True)
    assert not fleet.gate.passes(fleet.arrives("a", 200), hashes("other", 200), best_overlap=0, waiting=True)
    fleet.now += LONGEST_IDLE + 1
    assert not fleet.gate.passes(fleet.arrives("a", 100), hashes("other", 100), best_overlap=0, waiting=True)


def test_a_final_call_never_waits(fleet: Fleet) -> None:
    fleet.turn("a", 500)
    fleet.close()
    assert fleet.gate.passes(fleet.arrives("a", 510, final=True), hashes("a", 510), best_overlap=0, waiting=True)


def test_a_session_is_live_for_twice_its_announced_pause_and_not_in_a_long_one(fleet: Fleet) -> None:
    for name, pause in (("short", 10.0), ("long", LONGEST_IDLE + 1)):
        call = fleet.gate.sessions.call(key(name), MARK_TOKENS, False, next_call=pause)
        assert call is not None
        fleet.gate.sent(call, A, hashes(name, 1))
        call()
    fleet.gate.sessions.expire()
    assert fleet.gate.sessions.live().total() == 1
    fleet.now += 20
    fleet.gate.sessions.expire()
    assert fleet.gate.sessions.live().total() == 0


def test_records_and_their_contexts_have_a_bound(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.programs.sessions._MOST_SESSIONS", 50)
    monkeypatch.setattr("router.programs.sessions._MOST_MARKS", 400)
    sessions = fleet.gate.sessions
    for number in range(200):
        fleet.turn(f"{number}", 1)
    assert len(sessions) == sessions.live().total() == 50
    for number in range(200):
        fleet.turn(f"large {number}", 100)
    assert len(sessions) == sessions.live().total() == 4
    assert sessions.working_sets[A].tokens == 400 * MARK_TOKENS


def test_a_session_that_is_dropped_while_its_call_waits_is_charged_when_it_is_sent(fleet: Fleet) -> None:
    call = fleet.arrives("a", 10)
    fleet.gate.sessions.finish("a")
    fleet.gate.sent(call, A, hashes("a", 10))
    assert fleet.gate.sessions.working_sets[A].tokens == 10 * MARK_TOKENS
    call()
    assert fleet.arrives("a", 10).session.begun


def test_a_call_that_begins_a_session_of_a_live_program_is_a_subagents(fleet: Fleet) -> None:
    gate = fleet.gate

    def arrives(name: str, program: str) -> Call:
        call = gate.sessions.call(key(name), MARK_TOKENS, False, program=program)
        assert call is not None
        return call

    parent = arrives("parent", "run")
    assert not parent.subagent
    gate.sent(parent, A, hashes("parent", 1))
    assert arrives("child", "run").subagent
    assert not arrives("stranger", "other run").subagent
    parent()
    fleet.now += LONGEST_IDLE
    assert not arrives("late child", "run").subagent


def test_more_sessions_fit_by_the_mean_size_of_live_ones(fleet: Fleet) -> None:
    ranks = [RankCapacity(A, CAPACITY), RankCapacity(B, CAPACITY)]
    assert fleet.gate.more_sessions("m", ranks) is None
    fleet.turn("a", 90)
    fleet.turn("b", 110)
    assert fleet.gate.more_sessions("m", ranks) == 6 + 8  # of 100 marks, in 600 and 800
    assert fleet.gate.more_sessions("m", [*ranks, RankCapacity(C, None)]) is None
    fleet.now += LONGEST_IDLE + 1
    fleet.gate.sessions.expire()
    assert fleet.gate.more_sessions("m", ranks) == 8 + 8
    for number in range(10):
        fleet.turn(f"{number}", 100)
    assert fleet.gate.more_sessions("m", ranks) == 8  # none fit at the first, which has more than its room


def test_a_session_whose_last_call_another_router_sent_is_known_here_and_charged_there(fleet: Fleet) -> None:
    other = Fleet()
    for there in (fleet, other):
        there.close()
        there.gate.sessions.finish("lost")
    fleet.turn("a", 400)
    call = other.arrives("a", 420)
    prefixes = shared_hashes(hashes("a", 420)).tobytes()
    fleet.gate.heard(SentPrompt(1, B.worker, 0, "m", prefixes, call.session.number, 420 * MARK_TOKENS))
    assert fleet.gate.sessions.working_sets[A].tokens == 0
    returns = fleet.arrives("a", 430)
    assert returns.session.tokens == 420 * MARK_TOKENS
    assert fleet.gate.passes(returns, hashes("a", 430), best_overlap=420 * MARK_TOKENS, waiting=True)
    assert not fleet.gate.passes(returns, hashes("a", 430), best_overlap=40 * MARK_TOKENS, waiting=True)
    fleet.gate.sent(returns, A, hashes("a", 430))
    fleet.gate.heard(
        SentPrompt(2, B.worker, 0, "m", prefixes, call.session.number, 420 * MARK_TOKENS)
    )  # both have a call of it
    assert fleet.gate.sessions.live() == {"m": 1}
    returns()
    fleet.gate.sessions.finish("a")
    for number in range(20):  # sessions without a name here
        fleet.gate.heard(SentPrompt(3, B.worker, 0, "m", prefixes, 1 + number, 420 * MARK_TOKENS))
    fleet.now += FORGOTTEN_SECONDS
    fleet.gate.sessions.expire()
    assert (len(fleet.gate.sessions), fleet.gate.sessions._marks) == (0, 0)


def test_the_end_of_a_call_whose_session_was_finished_does_not_end_the_next_one(fleet: Fleet) -> None:
    first, waiting = fleet.arrives("a", 10), fleet.arrives("a", 12)
    fleet.gate.sent(first, A, hashes("a", 10))
    fleet.gate.sessions.finish("a")
    fleet.gate.sent(waiting, A, hashes("a", 12))
    first()
    assert fleet.gate.sessions.state(waiting.session) == "running"
    waiting()
    fleet.now += LONGEST_IDLE
    fleet.gate.sessions.expire()
    assert fleet.gate.sessions.live().total() == 0

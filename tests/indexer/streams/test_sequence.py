"""Ordering of one event stream, step by step. Times are simulated, in seconds."""

from __future__ import annotations

import msgspec
import pytest

from indexer.streams.sequence import Action, Apply, AskReplay, Clear, SequenceSettings, StreamSequence, StreamState
from kvevents.frames import SNAPSHOT_START, StreamFrame

SETTINGS = SequenceSettings(replay_timeout=1.0, replay_rounds=3, idle_check=30.0, pending_batches=10)


def frame(seq: int, life: int = 0) -> StreamFrame:
    return StreamFrame(seq, msgspec.msgpack.encode([1000.0 * life + seq, []]))


def applied(actions: list[Action]) -> list[int]:
    return [action.frame.seq for action in actions if isinstance(action, Apply)]


def state(sequence: StreamSequence) -> StreamState:
    return sequence.state


def end_of_replay(sequence: StreamSequence, now: float = 0.0) -> list[Action]:
    """End a replay of a publisher without snapshots, and return the actions."""
    actions = sequence.on_replay(None, now)
    return sequence.on_replay(None, now) if AskReplay(SNAPSHOT_START) in actions else actions


def live_at(seq: int, can_replay: bool = True) -> StreamSequence:
    """Return a live stream that has applied the batches up to `seq`."""
    sequence = StreamSequence(can_replay, SETTINGS)
    sequence.on_connected(0.0)
    for number in range(seq + 1):
        assert applied(sequence.on_live(frame(number), 0.0)) == [number]
    if can_replay:
        sequence.on_replay(frame(0), 0.0)
        sequence.on_replay(None, 0.0)
    assert state(sequence) is StreamState.LIVE
    assert sequence.last_seq == seq
    return sequence


def test_batches_in_order_are_applied_at_once() -> None:
    sequence = StreamSequence(False, SETTINGS)
    assert state(sequence) is StreamState.CONNECTING
    assert sequence.on_connected(0.0) == []
    assert state(sequence) is StreamState.LIVE
    assert sequence.on_live(frame(0), 0.0) == [Apply(frame(0))]
    assert sequence.on_live(frame(1), 0.0) == [Apply(frame(1))]
    assert (sequence.last_seq, sequence.counters.batches) == (1, 2)


def test_run_of_expected_batches_is_accepted() -> None:
    sequence = live_at(4)
    assert sequence.takes(5, frame(7), 2.0)
    assert (sequence.last_seq, sequence.last_frame, sequence.counters.batches) == (7, frame(7), 8)
    assert sequence.confirmed_at == 2.0
    assert sequence.on_live(frame(8), 3.0) == [Apply(frame(8))]


@pytest.mark.parametrize("first", [0, 4, 6])
def test_unexpected_run_is_not_accepted(first: int) -> None:
    sequence = live_at(4)
    assert not sequence.takes(first, frame(7), 2.0)
    assert (sequence.last_seq, sequence.counters.batches, sequence.pending) == (4, 5, 0)


def test_no_run_is_accepted_during_a_replay() -> None:
    sequence = live_at(4)
    sequence.on_connected(0.0)
    assert not sequence.takes(5, frame(6), 0.0)


def test_new_subscriber_requests_a_full_replay() -> None:
    sequence = StreamSequence(True, SETTINGS)
    assert sequence.on_connected(0.0) == [AskReplay(0)]
    assert state(sequence) is StreamState.REPLAYING
    assert sequence.on_live(frame(2), 0.0) == []
    assert sequence.pending == 1
    assert applied(sequence.on_replay(frame(0), 0.0)) == [0]
    assert applied(sequence.on_replay(frame(1), 0.0)) == [1, 2]
    assert sequence.on_replay(None, 0.0) == []
    assert state(sequence) is StreamState.LIVE


def test_publisher_without_batches_is_live() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    assert sequence.on_replay(None, 0.0) == []
    assert state(sequence) is StreamState.LIVE


def test_gap_requests_a_replay_from_the_last_batch() -> None:
    sequence = live_at(3)
    assert sequence.on_live(frame(6), 0.0) == [AskReplay(3)]
    assert sequence.on_live(frame(7), 0.0) == []
    for seq in (3, 4):
        sequence.on_replay(frame(seq), 0.0)
    assert applied(sequence.on_replay(frame(5), 0.0)) == [5, 6, 7]
    assert sequence.counters.gaps == 1


def test_duplicate_batch_is_applied_once() -> None:
    sequence = live_at(3)
    sequence.on_live(frame(5), 0.0)
    assert [applied(sequence.on_replay(frame(seq), 0.0)) for seq in (3, 4, 5)] == [[], [4, 5], []]
    sequence.on_replay(frame(6), 0.0)
    assert sequence.on_live(frame(6), 0.0) == []
    assert sequence.counters.duplicates == 1


@pytest.mark.parametrize("unreadable", [b"", b"\x92\x01\x02", b"\x92\x01\xc0"])
def test_duplicate_after_an_unreadable_batch_is_no_restart(unreadable: bytes) -> None:
    sequence = live_at(3)
    assert sequence.on_connected(0.0) == [AskReplay(3)]
    for replayed in (frame(3), frame(4), StreamFrame(5, unreadable)):
        sequence.on_replay(replayed, 0.0)
    assert sequence.on_live(frame(4), 0.0) == []
    assert (sequence.counters.duplicates, sequence.counters.restarts) == (1, 0)


def test_replay_with_gaps_is_requested_again() -> None:
    sequence = live_at(0)
    assert sequence.on_live(frame(4), 0.0) == [AskReplay(0)]
    sequence.on_replay(frame(0), 0.0)
    assert applied(sequence.on_replay(frame(1), 0.0)) == [1]
    assert applied(sequence.on_replay(frame(3), 0.0)) == []
    assert end_of_replay(sequence) == [AskReplay(1)]
    assert applied(sequence.on_replay(frame(2), 0.0)) == [2, 3, 4]


def test_interrupted_replay_is_requested_again() -> None:
    sequence = live_at(0)
    sequence.on_live(frame(4), 0.0)
    sequence.on_replay(frame(1), 1.0)
    assert sequence.on_tick(1.9) == []
    assert sequence.on_tick(2.0) == [AskReplay(1)]


def test_batch_0_does_not_exist_if_replays_begin_at_1() -> None:
    sequence = StreamSequence(True, SETTINGS)
    assert sequence.on_connected(0.0) == [AskReplay(0)]
    actions = sequence.on_live(frame(3), 0.0)
    for _ in range(2):
        for seq in (1, 2, 3):
            actions += sequence.on_replay(frame(seq), 0.0)
        actions += end_of_replay(sequence)
    assert applied(actions) == [1, 2, 3]
    assert (state(sequence), sequence.counters.lost_batches, sequence.complete) == (StreamState.LIVE, 0, True)
    assert applied(sequence.on_live(frame(4), 0.0)) == [4]
    sequence.on_live(frame(1, life=1), 0.0)
    assert applied(sequence.on_replay(frame(0, life=1), 0.0)) == [0, 1]


def test_batch_0_that_one_replay_lost_is_applied() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    sequence.on_replay(frame(1), 0.0)
    assert end_of_replay(sequence) == [AskReplay(0)]
    assert applied(sequence.on_replay(frame(0), 0.0)) == [0, 1]


def test_publisher_that_numbers_from_1_is_live_once_its_target_agrees() -> None:
    sequence = StreamSequence(False, SETTINGS)
    sequence.on_connected(0.0)
    assert applied(sequence.on_live(frame(1), 0.0)) == [1]
    assert (state(sequence), sequence.first_missing) == (StreamState.LOST, True)
    sequence.on_agreement()
    assert (state(sequence), sequence.first_missing, sequence.complete) == (StreamState.LIVE, False, True)
    assert applied(sequence.on_live(frame(2), 0.0)) == [2]
    assert sequence.on_live(frame(1, life=1), 0.0) == [Clear(), Apply(frame(1, life=1))]
    assert state(sequence) is StreamState.LIVE
    assert sequence.on_live(frame(0, life=2), 0.0) == [Clear(), Apply(frame(0, life=2))]


def test_agreement_does_not_excuse_later_batches() -> None:
    sequence = StreamSequence(False, SETTINGS)
    sequence.on_connected(0.0)
    sequence.on_live(frame(2), 0.0)
    sequence.on_agreement()
    assert state(sequence) is StreamState.LOST


def test_batches_missing_from_a_truncated_replay_are_lost() -> None:
    """The publisher can replay batches from 25 on only."""
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    actions: list[Action] = []
    for _ in range(1 + SETTINGS.replay_rounds):
        for seq in range(25, 30):
            actions += sequence.on_replay(frame(seq), 0.0)
        actions += end_of_replay(sequence)
    assert applied(actions) == [25, 26, 27, 28, 29]
    assert state(sequence) is StreamState.LOST
    assert sequence.counters.lost_batches == 25
    assert applied(sequence.on_live(frame(30), 0.0)) == [30]
    assert state(sequence) is StreamState.LOST


def test_silent_replay_delays_live_batches_by_at_most_its_timeout() -> None:
    sequence = live_at(0)
    assert sequence.on_live(frame(2), 10.0) == [AskReplay(0)]
    assert sequence.on_live(frame(3), 10.5) == []
    assert sequence.on_tick(10.9) == []
    assert applied(sequence.on_tick(11.0)) == [2, 3]
    assert (sequence.state, sequence.counters.lost_batches) == (StreamState.LOST, 1)
    assert sequence.counters.replays_unanswered == 1


def test_gaps_delay_no_batch_until_a_silent_replay_answers_again() -> None:
    sequence = live_at(0)
    sequence.on_live(frame(2), 10.0)
    sequence.on_tick(11.0)
    assert applied(sequence.on_live(frame(4), 11.0)) == [4]
    assert sequence.on_tick(60.0) == [AskReplay(4)]
    sequence.on_replay(None, 60.0)
    sequence.on_replay(frame(4), 60.0)
    end_of_replay(sequence, 60.0)
    assert sequence.on_live(frame(6), 60.0) == [AskReplay(4)]


def test_gap_without_replay_is_lost_at_once() -> None:
    sequence = live_at(0, can_replay=False)
    assert applied(sequence.on_live(frame(3), 0.0)) == [3]
    assert (sequence.state, sequence.counters.lost_batches) == (StreamState.LOST, 2)


def test_pending_batches_are_limited() -> None:
    sequence = live_at(0)
    waiting = [applied(sequence.on_live(frame(seq), 0.0)) for seq in range(2, 13)]
    assert waiting == [[]] * 10 + [list(range(2, 13))]
    assert sequence.counters.lost_batches == 1


def test_replay_beyond_the_pending_limit_continues() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    actions = [action for seq in range(5, 16) for action in sequence.on_replay(frame(seq), 0.0)]
    assert applied(actions) == list(range(5, 16))


@pytest.mark.parametrize("can_replay", [True, False])
def test_lower_sequence_number_is_a_restart(can_replay: bool) -> None:
    sequence = live_at(5, can_replay)
    assert sequence.on_live(frame(0, life=1), 0.0) == [Clear(), Apply(frame(0, life=1))]
    assert (sequence.last_seq, sequence.counters.restarts) == (0, 1)


def test_other_batch_with_the_same_number_is_a_restart() -> None:
    sequence = live_at(0)
    assert sequence.on_live(frame(0, life=1), 0.0) == [Clear(), Apply(frame(0, life=1))]


def test_restart_with_missed_first_batches_is_completed_by_a_replay() -> None:
    sequence = live_at(5)
    assert sequence.on_live(frame(2, life=1), 0.0) == [Clear(), AskReplay(0)]
    actions = [action for seq in range(3) for action in sequence.on_replay(frame(seq, life=1), 0.0)]
    assert actions == [Apply(frame(seq, life=1)) for seq in range(3)]


def test_restart_ends_the_lost_state() -> None:
    sequence = live_at(0, can_replay=False)
    sequence.on_live(frame(3), 0.0)
    assert state(sequence) is StreamState.LOST
    sequence.on_live(frame(0, life=1), 0.0)
    assert state(sequence) is StreamState.LIVE


def test_contiguous_restart_is_detected_in_the_replay() -> None:
    """The restarted publisher has exceeded the old sequence number before the reconnection."""
    sequence = live_at(5)
    assert sequence.on_connected(0.0) == [AskReplay(5)]
    assert applied(sequence.on_live(frame(6, life=1), 0.0)) == [6]
    assert sequence.on_replay(frame(5, life=1), 0.0) == [Clear(), AskReplay(0)]
    assert state(sequence) is StreamState.REPLAYING
    actions = [action for seq in range(7) for action in sequence.on_replay(frame(seq, life=1), 0.0)]
    assert applied(actions) == list(range(7))


def test_contiguous_restart_is_detected_in_a_late_replay() -> None:
    sequence = live_at(5)
    sequence.on_connected(0.0)
    sequence.on_live(frame(6, life=1), 0.0)
    sequence.on_tick(1.0)
    assert sequence.on_tick(60.0) == [AskReplay(5)], "the batch before the reconnection is still to be confirmed"
    assert sequence.on_replay(frame(5, life=1), 60.0) == [Clear(), AskReplay(0)]


def test_reconnection_to_the_same_publisher_clears_nothing() -> None:
    sequence = live_at(5)
    assert sequence.on_connected(0.0) == [AskReplay(5)]
    assert [sequence.on_replay(frame(seq), 0.0) for seq in (5, 6)] == [[], [Apply(frame(6))]]
    assert sequence.on_replay(None, 0.0) == []
    assert sequence.counters.restarts == 0


def test_restarted_publisher_without_batches_clears_the_target() -> None:
    sequence = live_at(5)
    assert sequence.on_connected(0.0) == [AskReplay(5)]
    for _ in range(2):
        assert sequence.on_replay(None, 0.0) == [AskReplay(5)], "the replayed batch may have been lost"
    assert sequence.on_replay(None, 0.0) == [Clear(), AskReplay(0)]
    assert sequence.on_replay(None, 0.0) == []
    assert (sequence.state, sequence.last_seq) == (StreamState.LIVE, None)


def test_publisher_without_kept_batches_is_no_restart() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    sequence.on_replay(None, 0.0)
    sequence.on_live(frame(0), 0.0)
    for now in (10.0, 50.0, 90.0):
        actions = sequence.on_tick(now)
        while AskReplay(0) in actions:
            actions = sequence.on_replay(None, now)
            assert Clear() not in actions
    assert state(sequence) is StreamState.LIVE


def test_idle_check_finds_lost_last_batches() -> None:
    sequence = live_at(2)
    assert sequence.on_tick(0.5) == []
    assert sequence.on_tick(1.0) == [AskReplay(2)]
    sequence.on_replay(frame(2), 1.0)
    assert applied(sequence.on_replay(frame(3), 1.0)) == [3]


def test_idle_checks_back_off_up_to_the_limit() -> None:
    sequence = live_at(2)
    checks = []
    for tenth in range(1500):
        now = tenth / 10
        if sequence.on_tick(now):
            checks.append(now)
            sequence.on_replay(frame(2), now)
            sequence.on_replay(None, now)
    assert checks == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0, 121.0]


def test_messages_of_an_abandoned_replay_are_ignored() -> None:
    sequence = live_at(0)
    sequence.on_live(frame(2), 0.0)
    sequence.on_tick(1.0)
    assert sequence.on_replay(frame(1), 2.0) == []
    assert sequence.on_replay(None, 2.0) == []
    assert applied(sequence.on_live(frame(3), 2.0)) == [3]


def test_clear_ends_the_lost_state() -> None:
    sequence = live_at(0, can_replay=False)
    sequence.on_live(frame(3), 0.0)
    assert state(sequence) is StreamState.LOST
    sequence.on_cleared(3)
    assert state(sequence) is StreamState.LIVE
    sequence.on_live(frame(4), 5.0)
    assert sequence.confirmed_at == 5.0


def test_clear_keeps_later_losses() -> None:
    sequence = live_at(0)
    for seq in (2, 4):
        sequence.on_live(frame(seq), 0.0)
    assert applied(sequence.on_tick(1.0)) == [2, 4]
    sequence.on_cleared(2)
    assert state(sequence) is StreamState.LOST, "batch 3 is missing"
    sequence.on_cleared(4)
    assert state(sequence) is StreamState.LIVE


def test_unanswered_replay_confirms_nothing() -> None:
    sequence = live_at(0)
    sequence.on_live(frame(1), 3.0)
    assert sequence.on_tick(10.0) == [AskReplay(1)]
    assert sequence.on_tick(11.0) == []
    assert (sequence.state, sequence.confirmed_at) == (StreamState.LIVE, 3.0)


def test_unverifiable_reconnection_is_lost() -> None:
    """The publisher can no longer replay the last applied batch, so a restart cannot be excluded."""
    sequence = live_at(5)
    actions = sequence.on_connected(0.0)
    while AskReplay(5) in actions:
        sequence.on_replay(frame(6), 0.0)
        actions = end_of_replay(sequence)
    assert (sequence.state, sequence.last_seq) == (StreamState.LOST, 6)


def test_restart_without_kept_batches_clears_once() -> None:
    sequence = live_at(5)
    assert Clear() in sequence.on_live(frame(0, life=1), 0.0)
    for now in (10.0, 50.0, 90.0):
        actions = sequence.on_tick(now)
        while AskReplay(0) in actions:
            actions = sequence.on_replay(None, now)
            assert Clear() not in actions
    assert (sequence.state, sequence.last_seq) == (StreamState.LIVE, 0)


def test_late_end_marker_does_not_end_a_later_replay() -> None:
    """Requests wait while the publisher is disconnected. After its reconnection it answers all of them."""
    sequence = live_at(5)
    asked = sum(bool(sequence.on_tick(now)) for now in (10.0, 11.0, 20.0, 21.0, 30.0, 31.0))
    assert asked == 3
    assert sequence.on_connected(40.0) == [AskReplay(5)]
    assert sequence.on_live(frame(7), 40.0) == []
    for _ in range(asked):
        assert sequence.on_replay(None, 40.0) == []
    sequence.on_replay(frame(5), 40.0)
    assert applied(sequence.on_replay(frame(6), 40.0)) == [6, 7]
    assert sequence.on_replay(None, 40.0) == []
    assert (sequence.state, sequence.counters.restarts, sequence.confirmed_at) == (StreamState.LIVE, 0, 40.0)


def test_lost_end_marker_delays_the_next_replay_by_at_most_the_timeout() -> None:
    sequence = live_at(0)
    assert sequence.on_tick(10.0) == [AskReplay(0)]
    assert sequence.on_tick(11.0) == []
    assert sequence.on_tick(20.0) == [AskReplay(0)]
    sequence.on_replay(frame(0), 20.0)
    assert sequence.on_replay(None, 20.0) == []
    sequence.on_tick(21.0)
    assert sequence.on_live(frame(2), 21.0) == [AskReplay(0)]
    assert applied(sequence.on_replay(frame(1), 21.0)) == [1, 2]
    assert sequence.on_replay(None, 21.0) == []


def test_batches_before_an_undetected_restart_are_lost_without_replay() -> None:
    sequence = live_at(5)
    actions = sequence.on_connected(0.0)
    assert applied(sequence.on_live(frame(6, life=1), 0.0)) == [6]
    cleared = False
    while any(isinstance(action, AskReplay) for action in actions):
        actions = sequence.on_replay(None, 0.0)
        cleared = cleared or Clear() in actions
    assert cleared
    assert (sequence.state, sequence.last_seq) == (StreamState.LOST, 6)
    assert sequence.on_live(frame(0, life=2), 0.0) == [Clear(), Apply(frame(0, life=2))]


def test_replay_rounds_are_limited_while_new_batches_arrive() -> None:
    """Each replay has a new batch, but never the missing one."""
    sequence = live_at(0)
    actions = sequence.on_live(frame(2), 0.0)
    rounds = 0
    while AskReplay(0) in actions:
        rounds += 1
        sequence.on_replay(frame(0), 0.0)
        sequence.on_replay(frame(2 + rounds), 0.0)
        actions = end_of_replay(sequence)
    assert applied(actions) == list(range(2, 3 + rounds))
    assert rounds == SETTINGS.replay_rounds


def test_confirmed_at_is_the_last_complete_time() -> None:
    sequence = live_at(0)
    assert sequence.on_live(frame(1), 3.0) == [Apply(frame(1))]
    assert sequence.confirmed_at == 3.0
    sequence.on_live(frame(3), 4.0)
    assert sequence.confirmed_at == 3.0
    sequence.on_replay(frame(2), 4.5)
    sequence.on_replay(None, 4.6)
    assert sequence.confirmed_at == 4.6


def test_stream_resumes_after_the_batch_of_a_snapshot_file() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.resume(frame(7))
    assert sequence.on_connected(0.0) == [AskReplay(7)]
    assert sequence.on_replay(frame(7), 0.0) == []
    assert applied(sequence.on_replay(frame(8), 0.0)) == [8]
    sequence.on_replay(None, 0.0)
    assert (sequence.state, sequence.counters.restarts) == (StreamState.LIVE, 0)


def test_batches_since_a_reconnection_are_complete_once_verified() -> None:
    sequence = live_at(5)
    sequence.on_connected(0.0)
    assert sequence.complete
    sequence.on_live(frame(6), 0.0)
    assert not sequence.complete, "it may be the seventh batch of another life"
    sequence.on_replay(frame(5), 0.0)
    assert sequence.complete


def test_resumed_stream_with_losses_stays_lost() -> None:
    sequence = live_at(0, can_replay=False)
    sequence.on_live(frame(3), 0.0)
    last = sequence.last_frame
    assert last is not None
    resumed = StreamSequence(True, SETTINGS)
    resumed.resume(last, sequence.complete)
    resumed.on_connected(0.0)
    resumed.on_replay(last, 0.0)
    end_of_replay(resumed)
    assert state(resumed) is StreamState.LOST


def test_resumed_stream_after_a_restart_is_cleared() -> None:
    sequence = StreamSequence(True, SETTINGS)
    sequence.resume(frame(7))
    sequence.on_connected(0.0)
    assert sequence.on_replay(frame(7, life=1), 0.0) == [Clear(), AskReplay(0)]


def test_resync_requests_a_full_replay() -> None:
    sequence = live_at(2)
    assert sequence.on_resync(1.0) == [Clear(), AskReplay(0)]
    assert sequence.on_live(frame(3), 1.0) == []
    assert applied([action for seq in range(3) for action in sequence.on_replay(frame(seq), 1.1)]) == [0, 1, 2, 3]
    assert sequence.on_replay(None, 1.2) == []
    assert (state(sequence), sequence.counters.resyncs, sequence.counters.restarts) == (StreamState.LIVE, 1, 0)


def test_resync_needs_a_connected_stream_with_replay() -> None:
    assert StreamSequence(True, SETTINGS).on_resync(0.0) == []
    assert live_at(2, can_replay=False).on_resync(1.0) == []


def asked_for_a_snapshot() -> StreamSequence:
    """Return a late subscriber of a publisher that can replay batches from 25 on only."""
    sequence = StreamSequence(True, SETTINGS)
    sequence.on_connected(0.0)
    sequence.on_live(frame(27), 0.0)
    sequence.on_replay(frame(25), 0.0)
    assert sequence.on_replay(None, 0.0) == [AskReplay(SNAPSHOT_START)]
    return sequence


def part(number: int, seq: int = 26) -> tuple[int, StreamFrame]:
    return number, frame(seq)


def last_part(number: int, seq: int = 26) -> tuple[int, StreamFrame]:
    return number, StreamFrame(seq, b"")


def test_snapshot_replaces_all_batches_up_to_its_own() -> None:
    sequence = asked_for_a_snapshot()
    assert sequence.on_live(frame(28), 0.0) == []
    assert sequence.on_snapshot(*part(0), 0.0) == [Apply(frame(26))]
    assert sequence.on_live(frame(29), 0.0) == []
    assert sequence.on_snapshot(*part(1), 0.0) == [Apply(frame(26))]
    assert applied(sequence.on_snapshot(*last_part(2), 0.0)) == [27, 28, 29]
    assert (sequence.state, sequence.counters.lost_batches, sequence.complete) == (StreamState.LIVE, 0, True)
    assert sequence.on_replay(None, 0.0) == []
    assert applied(sequence.on_live(frame(30), 0.0)) == [30]


def test_batches_missing_after_a_snapshot_are_requested() -> None:
    sequence = asked_for_a_snapshot()
    sequence.on_snapshot(*part(0, seq=25), 0.0)
    assert sequence.on_snapshot(*last_part(1, seq=25), 0.0) == [AskReplay(25)]


def test_partial_snapshot_is_cleared() -> None:
    sequence = asked_for_a_snapshot()
    sequence.on_snapshot(*part(0), 0.0)
    assert sequence.on_tick(0.9) == []
    actions = sequence.on_tick(1.0)
    assert (actions[0], applied(actions)) == (Clear(), [25, 27])
    assert sequence.state is StreamState.LOST
    assert sequence.on_snapshot(*part(1), 1.1) == []
    # The snapshot is requested again after its interval.
    assert AskReplay(SNAPSHOT_START) not in sequence.on_tick(1.5)
    sequence.on_live(frame(28), 5.9)
    assert sequence.on_tick(6.5) == [AskReplay(SNAPSHOT_START)]


@pytest.mark.parametrize("lost", [0, 1])
def test_snapshot_with_a_missing_part_is_ignored(lost: int) -> None:
    sequence = asked_for_a_snapshot()
    for number in (0, 1, 2):
        if number != lost:
            sequence.on_snapshot(*part(number), 0.0)
    assert Apply(frame(26)) not in sequence.on_snapshot(*last_part(3), 0.0)
    assert sequence.on_replay(None, 0.0) != []
    assert sequence.counters.snapshots == 0


def test_reconnection_during_a_snapshot_clears_and_replays_all() -> None:
    sequence = asked_for_a_snapshot()
    sequence.on_snapshot(*part(0), 0.0)
    assert sequence.on_connected(0.5) == [Clear(), AskReplay(0)]


def test_restart_during_a_snapshot_clears_its_parts() -> None:
    sequence = asked_for_a_snapshot()
    sequence.on_snapshot(*part(0), 0.0)
    assert sequence.on_live(frame(0, life=1), 0.5) == [Clear(), Apply(frame(0, life=1))]


def test_unanswered_snapshot_request_falls_back_to_a_replay() -> None:
    sequence = asked_for_a_snapshot()
    assert sequence.on_tick(1.0) == [AskReplay(0)]
    assert sequence.on_tick(2.0) == [Apply(frame(25)), Apply(frame(27))]


def test_idle_check_counts_apart_from_replays() -> None:
    sequence = live_at(1)
    replays = sequence.counters.replays
    assert sequence.on_tick(40.0) == [AskReplay(1)]
    assert (sequence.counters.idle_checks, sequence.counters.replays) == (1, replays)
    sequence.on_replay(frame(1), 40.0)
    sequence.on_replay(frame(3), 40.0)  # batch 2 was lost
    end_of_replay(sequence, 40.0)
    assert (sequence.counters.idle_checks, sequence.counters.replays) == (1, replays + 1)

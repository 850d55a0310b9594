from __future__ import annotations

from router.load.target_load import LoadTable, Reservation


def test_reader_receives_changes_since_its_last_read() -> None:
    table = LoadTable()
    first, second = table.of("a", 0), table.of("b", 0)
    end = table.journal.end
    Reservation(second, 1, 1).release()
    assert table.journal.since(end) == [second.slot, second.slot]
    assert table.journal.since(table.journal.end) == []
    table.changed("a", 0)
    assert table.journal.since(end) == [second.slot, second.slot, first.slot]


def test_slow_reader_is_notified_and_journal_is_bounded() -> None:
    table = LoadTable()
    load = table.of("a", 0)
    for _ in range(100_000):
        table.changed("a", 0)
    assert table.journal.since(0) is None
    end = table.journal.end
    assert end == 100_000
    Reservation(load, 1, 1)
    changed = table.journal.since(end)
    assert changed is None or changed == [load.slot]
    assert len(table.journal) < 10_000

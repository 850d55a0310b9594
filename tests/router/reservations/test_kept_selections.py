import pytest

from router.reservations import kept_selections
from router.reservations.kept_selections import SELECTION_SECONDS, KeptSelections
from router.reservations.selection_bodies import SelectBody


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(tokens: int = 1) -> SelectBody:
    return SelectBody(token_ids=list(range(tokens)))


def test_selection_is_returned_with_its_tokens_until_it_expires() -> None:
    clock = Clock()
    kept = KeptSelections(clock)
    kept.keep("a", asked(3), member=7, dp_rank=1)
    clock.now = SELECTION_SECONDS - 1
    found = kept.get("a", "default", "default")
    assert found is not None
    assert (found.member, found.dp_rank, found.request().token_ids) == (7, 1, [0, 1, 2])
    assert kept.get("a", "other", "default") is None
    clock.now = SELECTION_SECONDS
    assert kept.get("a", "default", "default") is None


def test_oldest_selections_are_dropped_beyond_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_selections, "MOST_SELECTIONS", 2)
    monkeypatch.setattr(kept_selections, "MOST_TOKENS", 10)
    kept = KeptSelections(Clock())
    for id in "abc":
        kept.keep(id, asked(), 1, 0)
    assert [id for id in "abc" if kept.get(id, "default", "default")] == ["b", "c"]
    kept.keep("c", asked(9), 1, 0)
    assert kept.get("b", "default", "default") is not None
    kept.keep("d", asked(8), 1, 0)
    assert [id for id in "bcd" if kept.get(id, "default", "default")] == ["d"]

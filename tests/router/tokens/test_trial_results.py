"""Results of tokenizer trials on disk: stored, bounded, and tried again if damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.tokens.trial_results import TrialResult, read_result, write_result

KEY = "a" * 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvrouter" / "trials"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("difference", [None, "", "it encodes 'ﬁ' differently"])
def test_result_is_read_as_it_was_stored(difference: str | None) -> None:
    assert read_result(KEY) is None
    write_result(TrialResult(KEY, difference))
    assert read_result(KEY) == TrialResult(KEY, difference)


def test_damaged_file_counts_as_missing_and_is_replaced(folder: Path) -> None:
    write_result(TrialResult(KEY, None))
    whole = (folder / KEY).read_bytes()
    other = whole.replace(b"a" * 64, b"b" * 64)
    for damaged in (b"", whole[:-1], whole + b"x", whole.replace(b"null", b"0"), b"\xff" * 9, other, b"[" * 9_999):
        (folder / KEY).write_bytes(damaged)
        assert read_result(KEY) is None, damaged
        write_result(TrialResult(KEY, "another"))
        assert read_result(KEY) == TrialResult(KEY, "another")


def test_oldest_results_are_deleted_beyond_a_limit(folder: Path) -> None:
    for number in range(70):
        write_result(TrialResult(f"{number:064x}", None))
        os.utime(folder / f"{number:064x}", (number, number))
    write_result(TrialResult(KEY, None))
    assert sorted(os.listdir(folder)) == sorted([*(f"{number:064x}" for number in range(7, 70)), KEY])


def test_folder_that_cannot_be_written_stores_nothing(folder: Path) -> None:
    folder.parent.parent.joinpath("kvrouter").write_text("no folder")
    write_result(TrialResult(KEY, None))
    assert read_result(KEY) is None


@pytest.mark.parametrize("difference", ["x" * 100_000, "\udc80"])
def test_result_that_does_not_fit_into_a_file_is_not_stored(folder: Path, difference: str) -> None:
    write_result(TrialResult(KEY, difference))
    assert not folder.exists()

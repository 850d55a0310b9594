"""The limits of targets, and what the state of routing counts for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.make_routing import MODEL, make_fleet, make_routing
from indexer import Indexer
from router.admission.admission import Admission
from router.apis.requests import RoutedRequest
from router.routing.ranks import Limits
from router.settings import ConfigError, Settings, WorkerSettings, load_settings


def test_closing_ranks_keeps_all_other_limits() -> None:
    limits = Limits(3, 600, computed=True, lenient=True, paced=True)
    closed = limits.without([("http://w", 0)])
    assert (closed.requests, closed.tokens, closed.computed, closed.lenient, closed.paced) == (3, 600, True, True, True)
    assert list(closed.closed) == [("http://w", 0)]
    assert not Limits().without([("http://w", 0)]).unlimited


@pytest.mark.parametrize(("value", "computed"), [(None, False), (4, False), ("auto", True)])
def test_memory_of_running_prompts_counts_only_for_computed_limits(
    value: int | None, computed: bool, indexer: Indexer
) -> None:
    settings = Settings.model_validate({"admission": {"requests": value}})
    fleet = make_fleet([WorkerSettings.model_validate({"url": "http://w:1"})], indexer)
    routing = make_routing(fleet, indexer, settings)
    admission = Admission(routing.selector, routing.placement, settings.admission, late_binding=True)
    assert admission.limits.computed is computed
    routing.placement.place(RoutedRequest(MODEL, streamed=True))
    load = routing.state.load.of("http://w:1", 0)
    assert (load.outputs > 0) is computed


def test_requests_are_a_number_auto_or_null(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("admission: {requests: auto}")
    assert load_settings(file).admission.requests == "auto"
    file.write_text("admission: {requests: automatic}")
    with pytest.raises(ConfigError, match=r"admission\.requests"):
        load_settings(file)

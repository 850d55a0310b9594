"""The workers of several sources, merged."""

from __future__ import annotations

from router.fleet.worker_sources import WorkerSources
from router.settings import WorkerSettings


def worker(host: str, name: str | None = None) -> WorkerSettings:
    return WorkerSettings.model_validate({"url": f"http://{host}:1", "name": name})


def test_first_source_counts_when_two_name_the_same_url() -> None:
    sources = WorkerSources([worker("a", "configured")])
    sources.assign("kubernetes", [worker("a", "pod"), worker("b", "pod")])
    assert {url: (each.name, each.source) for url, each in sources.merged().items()} == {
        "http://a:1": ("configured", "config"),
        "http://b:1": ("pod", "kubernetes"),
    }


def test_worker_with_a_duplicate_name_is_shown_by_its_url() -> None:
    sources = WorkerSources([worker("a", "gpu")])
    sources.assign("api", [worker("b", "gpu")])
    assert [each.name for each in sources.merged().values()] == ["gpu", "http://b:1"]


def test_only_hosts_of_added_workers_are_untrusted() -> None:
    sources = WorkerSources([worker("a")])
    sources.assign("api", [worker("a"), worker("b"), worker("c")])
    sources.assign("kubernetes", [worker("c")])
    assert [host for host in "abcd" if sources.is_untrusted_host(host)] == ["b"]

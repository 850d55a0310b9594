"""Dynamo's class over a selector: the answers and errors of `dynamo.llm.SelectionService` 1.6.1 to the same calls."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.adapters.dynamo import SelectionService, SelectionServiceError

WORKER = {"worker_id": 1, "endpoint": "ray://a", "block_size": 16}
TOKENS = list(range(64))


async def test_service_before_its_first_call_has_nothing() -> None:
    service = SelectionService(indexer_threads=1)
    assert service.list_workers() == service.loads() == []
    assert service.ready() == {"ready": False, "schedulable_workers": 0, "workers": []}
    service.shutdown()


async def test_all_fourteen_methods_answer_as_dynamos() -> None:
    service = SelectionService()
    record = await service.upsert_worker(WORKER | {"kv_events_endpoints": {0: "tcp://127.0.0.1:1"}})
    assert (record["lifecycle"], record["endpoint"]) == ("schedulable", "ray://a")
    assert service.list_workers(model_name="default", routing_group="default") == [record]
    assert service.ready()["ready"] is True
    assert (await service.select({"token_ids": TOKENS, "selection_id": "s"}))["worker_id"] == 1
    assert (await service.create_reservation({"selection_id": "s"}))["worker_id"] == 1
    reserved = await service.select_and_reserve({"token_ids": TOKENS, "selection_id": "a"})
    assert (reserved["selection_id"], reserved["endpoint"]) == ("a", "ray://a")
    await service.prefill_complete("a")
    service.add_output_block("a", decay_fraction=0.5)
    [partition] = service.loads()
    assert partition["loads"][0]["active_requests"] == 2
    assert (await service.overlap_scores({"token_ids": TOKENS}))["workers"][0]["device_blocks"] == 0
    assert (await service.potential_loads({"token_ids": TOKENS}))[0]["active_requests"] == 2
    await service.free_reservation("a")
    await service.free_reservation("s")
    assert service.loads()[0]["loads"][0]["active_requests"] == 0
    assert (await service.delete_worker(1))["lifecycle"] == "unschedulable"
    service.shutdown()
    service.shutdown()
    with pytest.raises(SelectionServiceError, match="shutting down"):
        await service.select({"token_ids": TOKENS})


@pytest.mark.parametrize(
    ("call", "kind", "status"),
    [
        (lambda service: service.select({"token_ids": TOKENS, "model_name": "x"}), "not_ready", 503),
        (lambda service: service.select({"token_ids": TOKENS, "allowed_worker_ids": [9]}), "scheduler", 503),
        (lambda service: service.select_and_reserve({"token_ids": TOKENS, "selection_id": "held"}), "conflict", 409),
        (lambda service: service.free_reservation("none"), "not_found", 404),
        (lambda service: service.delete_worker(9), "not_found", 404),
    ],
)
async def test_refusal_has_dynamos_kind_and_status(call: Any, kind: str, status: int) -> None:
    service = SelectionService()
    await service.upsert_worker(WORKER)
    await service.select_and_reserve({"token_ids": TOKENS, "selection_id": "held"})
    with pytest.raises(SelectionServiceError) as refused:
        await call(service)
    assert (refused.value.kind, refused.value.status_code) == (kind, status)
    service.shutdown()


@pytest.mark.parametrize("request_", [{}, {"token_ids": "a"}, {"token_ids": [-1]}])
async def test_wrong_request_is_a_value_error(request_: Any) -> None:
    service = SelectionService()
    await service.upsert_worker(WORKER)
    with pytest.raises(ValueError, match=r"token_ids|int"):
        await service.select(request_)
    service.shutdown()


async def test_peers_are_refused() -> None:
    with pytest.raises(ValueError, match="sharing"):
        SelectionService(indexer_peers=["http://127.0.0.1:1"])

"""Where decode workers ask a prefill worker for its blocks."""

from __future__ import annotations

from fastapi import APIRouter, Request

from simulator.worker.disaggregation.nixl import PULL_PATH, NixlPrefill, PullAnswer, PullRequest

routes = APIRouter()


@routes.post(PULL_PATH)
async def pull(body: PullRequest, request: Request) -> PullAnswer:
    role = request.app.state.worker.disaggregated.role
    assert isinstance(role, NixlPrefill)
    return role.pull(body)

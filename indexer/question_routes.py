"""The routes of the questions, for whatever serves an application."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from http_api.openapi import errors, json_body
from http_api.responses import encoded_response
from indexer.question_bodies import HashQueryBody, MatchBody, QueryBody
from indexer.questions import Questions


def question_routes(questions: Questions) -> APIRouter:
    """The routes that ask who holds what."""
    routes = APIRouter()

    @routes.post("/match", openapi_extra=json_body(MatchBody), responses=errors(400, 404))
    async def match(request: Request) -> Response:
        """How many tokens of a prompt each target would serve from its cache, the best first."""
        answer = questions.match(await request.body())
        return encoded_response(answer if isinstance(answer, bytes) else await answer)

    @routes.post("/query", openapi_extra=json_body(QueryBody), responses=errors(400, 404))
    async def query(request: Request) -> Response:
        """How much of a token sequence each instance holds, its last block too."""
        return encoded_response(questions.query(await request.body()))

    @routes.post("/query_by_hash", openapi_extra=json_body(HashQueryBody), responses=errors(400, 404))
    async def query_by_hash(request: Request) -> Response:
        """The same for prefix hashes."""
        return encoded_response(questions.query_by_hash(await request.body()))

    return routes

"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: vectors computed from a text's tokens, and their similarity."""

from __future__ import annotations

import base64
import math
import secrets
import time
from array import array
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel

from simulator.worker.protocol import ApiError, TokenId
from simulator.worker.tokens import ChatTokenizer

DIMENSIONS = 64


class EmbeddingRequest(BaseModel):
    """The body of POST /v1/embeddings."""

    model: str | None = None
    input: str | list[TokenId] | list[str] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"

    def inputs(self) -> list[Any]:
        """Return the texts or lists of tokens, one by one."""
        many = isinstance(self.input, list) and self.input and not isinstance(self.input[0], int)
        return list(self.input) if many else [self.input]


class RerankRequest(BaseModel):
    """The body of POST /v1/rerank."""

    model: str | None = None
    query: str
    documents: list[str]
    top_n: int = 0


class ScoreRequest(BaseModel):
    """The body of POST /v1/score."""

    model: str | None = None
    text_1: str
    text_2: str | list[str]


class Pooling:
    """A service that answers from a text's tokens, without the model."""

    def __init__(self, tokenizer: ChatTokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self._model = model

    def embeddings(self, body: EmbeddingRequest) -> dict[str, Any]:
        """Return a vector for each input. Raises ApiError."""
        tokens = [self._tokens(each) for each in body.inputs()]
        if not all(tokens):
            raise ApiError(HTTPStatus.BAD_REQUEST, "input must not be empty.", "input")
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(_vector(each), body.encoding_format)}
            for index, each in enumerate(tokens)
        ]
        return self._answer("embd", tokens) | {"object": "list", "data": data}

    def rerank(self, body: RerankRequest) -> dict[str, Any]:
        """Return the documents, the most similar to the query first."""
        query, *documents = tokens = [self._tokens(text) for text in (body.query, *body.documents)]
        results = [
            {"index": index, "document": {"text": text}, "relevance_score": _nearness(query, each)}
            for index, (text, each) in enumerate(zip(body.documents, documents, strict=True))
        ]
        results.sort(key=lambda result: -float(str(result["relevance_score"])))
        return self._answer("rerank", tokens) | {"results": results[: body.top_n or None]}

    def score(self, body: ScoreRequest) -> dict[str, Any]:
        """Return the similarity of each text to the first one."""
        others = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        first, *rest = tokens = [self._tokens(text) for text in (body.text_1, *others)]
        data = [{"object": "score", "index": index, "score": _nearness(first, each)} for index, each in enumerate(rest)]
        return self._answer("score", tokens) | {"object": "list", "data": data}

    def _tokens(self, given: str | list[int]) -> list[int]:
        return self._tokenizer.encode(given) if isinstance(given, str) else given

    def _answer(self, kind: str, tokens: list[list[int]]) -> dict[str, Any]:
        total = sum(map(len, tokens))
        usage = {"prompt_tokens": total, "total_tokens": total}
        return {
            "id": f"{kind}-{secrets.token_hex(8)}",
            "created": int(time.time()),
            "model": self._model,
            "usage": usage,
        }


def _vector(tokens: list[int]) -> list[float]:
    total = [0.0] * DIMENSIONS
    for token in tokens:
        for place, byte in enumerate(blake2b(token.to_bytes(4, "little"), digest_size=DIMENSIONS).digest()):
            total[place] += byte - 127.5
    length = math.hypot(*total)
    return [value / length for value in total]


def _nearness(tokens: list[int], others: list[int]) -> float:
    if not tokens or not others:
        return 0.0
    return sum(a * b for a, b in zip(_vector(tokens), _vector(others), strict=True))


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    return vector if encoding == "float" else base64.b64encode(array("f", vector).tobytes()).decode()

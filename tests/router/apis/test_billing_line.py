"""The billing line of Claude Code's prompts is cut out of a body, and no other byte changes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.billing_line import without_billing_line

LINE = "x-anthropic-billing-header: cc_version=2.1.36.1a2; cc_entrypoint=cli; cch=00a1f;"
MESSAGES, CHAT, RESPONSES = "/v1/messages", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": [{"type": "text", "text": LINE}]}


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (MESSAGES, {"system": [block(LINE), block("Be brief.")]}, {"system": [block("Be brief.")]}),
        (MESSAGES, {"system": [block("Be brief."), block(LINE)]}, {"system": [block("Be brief.")]}),
        (MESSAGES, {"system": [block(LINE, cache_control={"type": "ephemeral"})]}, None),
        (MESSAGES, {"system": [block(f"{LINE}\nBe é \\n."), block("x")]}, {"system": [block("Be é \\n."), block("x")]}),
        (MESSAGES, {"system": f"{LINE}\nBe brief."}, {"system": "Be brief."}),
        (
            CHAT,
            {"messages": [{"role": "system", "content": f"{LINE}\nA"}]},
            {"messages": [{"role": "system", "content": "A"}]},
        ),
        (
            CHAT,
            {"messages": [{"content": [block(LINE), block("A")], "role": "system"}, USER]},
            {"messages": [{"content": [block("A")], "role": "system"}, USER]},
        ),
        (
            CHAT,
            {"messages": [{"role": "system", "content": "A"}, {"role": "developer", "content": [LINE, "B"]}]},
            {"messages": [{"role": "system", "content": "A"}, {"role": "developer", "content": ["B"]}]},
        ),
        (RESPONSES, {"instructions": f"{LINE}\nA", "input": LINE}, {"instructions": "A", "input": LINE}),
    ],
)
def test_the_line_is_cut(path: str, body: dict[str, Any], expected: dict[str, Any] | None, indent: int | None) -> None:
    sent = json.dumps({"model": "m", **body, "stream": True}, indent=indent, ensure_ascii=False).encode()
    cut = without_billing_line(path, sent)
    assert cut is not None
    if expected is None:
        expected = json.loads(json.dumps(body).replace(LINE, ""))
    assert json.loads(cut) == {"model": "m", **expected, "stream": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES, {"system": "Be brief.", "messages": [USER]}),
        (MESSAGES, {"system": [block(f"Not {LINE}")], "messages": [{"role": "user", "content": LINE}]}),
        (MESSAGES, {"system": None, "metadata": LINE}),
        (MESSAGES, {"system": {"text": LINE}}),
        (MESSAGES, {"messages": [USER]}),
        (CHAT, {"messages": [USER, {"role": "system", "content": LINE}]}),
        (CHAT, {"messages": LINE}),
        (CHAT, {"messages": [LINE]}),
        (CHAT, {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": LINE}]}]}),
        (RESPONSES, {"input": [{"role": "system", "content": LINE}]}),
        ("/v1/completions", {"prompt": LINE}),
    ],
)
def test_other_texts_that_begin_like_it_stay(path: str, body: dict[str, Any]) -> None:
    assert without_billing_line(path, json.dumps(body).encode()) is None


@given(
    st.lists(st.text(max_size=8), max_size=3),
    st.lists(st.text(max_size=8), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_cutting_leaves_what_the_body_was_without_the_line(
    before: list[str], after: list[str], ascii_only: bool, indent: int | None
) -> None:
    blocks = [block(text) for text in before], [block(text, n=[1, {"a": "]"}]) for text in after]
    sent, expected = (
        json.dumps({"system": [*blocks[0], *line, *blocks[1]], "x": 1.50}, ensure_ascii=ascii_only, indent=indent)
        for line in ([block(LINE)], [])
    )
    assert without_billing_line(MESSAGES, sent.encode(errors="surrogatepass")) == expected.encode(
        errors="surrogatepass"
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"system":"x-anthropic-billing-header', b'["x-anthropic-billing-header"]']
)
def test_bodies_of_another_form_stay(body: bytes) -> None:
    assert without_billing_line(MESSAGES, body) is None

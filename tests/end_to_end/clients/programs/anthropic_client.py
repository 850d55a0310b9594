"""The anthropic client: `python anthropic_client.py URL`. It prints the number of its requests."""

from __future__ import annotations

import sys
from typing import Any

from anthropic import Anthropic

MODEL = "simulated"
ABOUT = "You keep the books of a harbour: berths, cargo, dues, pilots and the tide of each day, in short lines. " * 4


def main(url: str) -> int:
    """Send the turns of a conversation, whole and streamed, and return the number of requests."""
    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
    messages: list[Any] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Day {turn}: who owes dues?"})
        prompt: Any = {"model": MODEL, "system": ABOUT, "messages": messages, "max_tokens": 8}
        whole = client.messages.create(**prompt)
        said = whole.content[0].text
        assert said
        with client.messages.stream(**prompt) as stream:
            final = stream.get_final_message()
        assert final.content[0].text == said
        assert final.usage.output_tokens == whole.usage.output_tokens == 8
        messages.append({"role": "assistant", "content": said})
    tool: Any = {"name": "tide", "description": "The tide.", "input_schema": {"type": "object", "properties": {}}}
    assert client.messages.create(model=MODEL, max_tokens=4, messages=messages[:1], tools=[tool]).content
    assert client.messages.count_tokens(model=MODEL, messages=messages[:1]).input_tokens
    return 4 * 2 + 1


if __name__ == "__main__":
    print(main(sys.argv[1]))

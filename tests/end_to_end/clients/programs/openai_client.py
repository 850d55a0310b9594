"""The openai client: `python openai_client.py URL`. It prints the number of its requests."""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

MODEL = "simulated"
ABOUT = "You keep the log of a lighthouse: the wind, the ships that pass, the state of the lamp and of the stores. " * 4


def main(url: str) -> int:
    """Send requests of every API, whole and streamed, and return their number."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    assert MODEL in [model.id for model in client.models.list()]
    messages: list[Any] = [{"role": "system", "content": ABOUT}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"Watch {turn}: which ships passed?"})
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=1)
        said = whole.choices[0].message.content
        assert said
        pieces, usage = [], None
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, seed=1, **options):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or usage
        assert "".join(pieces) == said
        assert usage is not None
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        messages.append({"role": "assistant", "content": said})
    tool: Any = {"type": "function", "function": {"name": "wind", "parameters": {"type": "object", "properties": {}}}}
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, tools=[tool]).choices
    first = client.responses.create(model=MODEL, instructions=ABOUT, input="Lamp?", max_output_tokens=8)
    assert first.output_text
    prompt: Any = {"model": MODEL, "input": "And the stores?", "previous_response_id": first.id}
    with client.responses.stream(**prompt, max_output_tokens=8) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"  # for the limit of its length
    assert events[-1].response.output_text
    assert client.completions.create(model=MODEL, prompt=ABOUT, max_tokens=8).choices[0].text
    assert client.embeddings.create(model=MODEL, input=[ABOUT, "the wind"]).data[1].embedding
    return 4 * 2 + 5


if __name__ == "__main__":
    print(main(sys.argv[1]))

"""LiteLLM: `python litellm_client.py URL`. It prints the number of its requests."""

from __future__ import annotations

import sys
from typing import Any

import litellm

MODEL = "simulated"
ABOUT = "You answer for a railway: platforms, delays, connections and lost bags, politely and in one sentence. " * 4


def main(url: str) -> int:
    """Send requests as OpenAI's and as Anthropic's provider, and return their number."""
    litellm.suppress_debug_info = True
    openai: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "timeout": 60}
    anthropic: Any = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "timeout": 60}
    for provider in (openai, anthropic):
        messages: list[Any] = [{"role": "system", "content": ABOUT}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"Train {turn}: is it late?"})
            whole = litellm.completion(messages=messages, max_tokens=8, num_retries=0, **provider)
            said = whole.choices[0].message.content
            assert said
            assert whole.usage.completion_tokens == 8
            stream = litellm.completion(messages=messages, max_tokens=8, num_retries=0, stream=True, **provider)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said
            messages.append({"role": "assistant", "content": said})
    assert litellm.responses(input="Bags?", instructions=ABOUT, max_output_tokens=8, **openai).output
    assert litellm.embedding(input=["platform", "bag"], **openai).data
    text: Any = openai | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt=ABOUT, max_tokens=8, **text).choices[0].text
    return 2 * 3 * 2 + 3


if __name__ == "__main__":
    print(main(sys.argv[1]))

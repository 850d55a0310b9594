"""LangChain: `python langchain_client.py URL`. It prints the number of its requests."""

from __future__ import annotations

import sys
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

MODEL = "simulated"
ABOUT = "You advise a garden: soil, seeds, frost, water and pests, with one thing to do for each question asked. " * 4


def main(url: str) -> int:
    """Send chats of OpenAI's and Anthropic's models, a chain and a batch, and return the number of requests."""
    common: Any = {"model": MODEL, "api_key": "none", "max_retries": 0, "timeout": 60}
    openai = ChatOpenAI(base_url=f"{url}/v1", max_tokens=8, stream_usage=True, **common)
    anthropic = ChatAnthropic(base_url=url, max_tokens=8, **common)
    for chat in (openai, anthropic):
        messages: list[Any] = [SystemMessage(ABOUT)]
        for turn in range(3):
            messages.append(HumanMessage(f"Week {turn}: what do I sow?"))
            whole = chat.invoke(messages)
            assert whole.content
            assert whole.usage_metadata["output_tokens"] == 8
            assert "".join(str(chunk.text) for chunk in chat.stream(messages)) == str(whole.text)
            messages.append(AIMessage(str(whole.text)))
    chain = ChatPromptTemplate.from_messages([("system", ABOUT), ("human", "{plant}?")]) | openai
    answers = chain.batch([{"plant": plant} for plant in ("Leek", "Kale", "Bean", "Sage")])
    assert all(answer.content for answer in answers)
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
    )
    assert len(embeddings.embed_documents(["frost", "water"])) == 2
    return 2 * 3 * 2 + 4 + 1


if __name__ == "__main__":
    print(main(sys.argv[1]))

"""`langchain-openai` against a gateway: python langchain_client.py BASE_URL MODEL."""

from __future__ import annotations

import asyncio
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

BASE_URL, MODEL = sys.argv[1:3]
QUESTION = [SystemMessage("Be brief."), HumanMessage("Complete the sentence: The capital of Japan is")]


def main() -> int:
    chat = ChatOpenAI(base_url=BASE_URL, api_key="any", model=MODEL, temperature=0, max_tokens=20)
    answer = chat.invoke(QUESTION)
    assert "Tokyo" in str(answer.content), answer
    assert answer.usage_metadata is not None
    print("ok      invoke", answer.usage_metadata["total_tokens"], "tokens")

    streamed = "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    assert streamed == answer.content, (streamed, answer.content)
    print("ok      stream")

    answers = chat.batch([QUESTION] * 4)
    assert {one.content for one in answers} == {answer.content}
    print("ok      batch")

    again = asyncio.run(chat.ainvoke(QUESTION))
    assert again.content == answer.content
    print("ok      ainvoke")

    likely = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert likely.response_metadata["logprobs"]["content"]
    print("ok      logprobs")

    text = OpenAI(base_url=BASE_URL, api_key="any", model=MODEL, temperature=0, max_tokens=5)
    assert "Tokyo" in text.invoke("The capital of Japan is")
    print("ok      completion")
    return 0


if __name__ == "__main__":
    sys.exit(main())

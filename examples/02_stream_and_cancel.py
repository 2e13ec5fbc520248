"""Stop an answer in the middle, in a thread and in asyncio, and go on from the same session.

python examples/02_stream_and_cancel.py
"""

from __future__ import annotations

import asyncio

from langchain_core.messages import BaseMessage, HumanMessage

from dlite_agent import ChatDLite

QUESTION = [HumanMessage("Say hello, and then what you can do for a repository with a bug.")]
CHUNKS = 3


def stop_a_stream(model: ChatDLite) -> None:
    """Leaving the loop ends the turn within one prefill chunk or one round."""
    stream = model.stream(QUESTION)
    for number, chunk in enumerate(stream, start=1):
        print(chunk.content, end="", flush=True)
        if number == CHUNKS:
            break
    stream.close()
    print(" [stopped]")


async def stop_a_task(model: ChatDLite) -> None:
    """Cancelling the task that reads does the same."""
    task = asyncio.create_task(model.ainvoke(QUESTION))
    await asyncio.sleep(0.05)
    task.cancel()
    try:
        await task
        print("[it was faster]")
    except asyncio.CancelledError:
        print("[cancelled]")


def main() -> BaseMessage:
    model = ChatDLite("nano", temperature=0, max_tokens=64, enable_thinking=False)
    stop_a_stream(model)
    asyncio.run(stop_a_task(model))
    answer = model.invoke(QUESTION)  # the prompt is in the session still
    print(answer.content)
    stats = answer.response_metadata["dlite"]
    print(f"{stats['cached_tokens']} of {stats['prompt_tokens']} prompt tokens were cached")
    return answer


if __name__ == "__main__":
    main()

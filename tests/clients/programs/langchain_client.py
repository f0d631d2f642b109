"""What LangChain gets from a server, as JSON. Runs in LangChain's own environment; argument: the base URL."""

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

MODEL, BASE_URL = "smollm2-135m", sys.argv[1]
COMMON = {"model": MODEL, "base_url": BASE_URL, "api_key": "k", "temperature": 0, "max_retries": 0}
QUESTION = "What is the capital of France?"
CITY = {
    "title": "city",
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["name"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Look out.", "parameters": CITY}}

chat = ChatOpenAI(max_tokens=20, stream_usage=True, **COMMON)
whole = chat.invoke(QUESTION)
streamed = None
for chunk in chat.stream(QUESTION):
    streamed = chunk if streamed is None else streamed + chunk
batch = chat.batch([QUESTION, "Say hello."])
structured = chat.with_structured_output(CITY, method="json_schema").invoke(QUESTION)

caller = ChatOpenAI(max_tokens=60, **COMMON).bind_tools([WEATHER], tool_choice="get_weather")
called = caller.invoke(QUESTION)
called_streamed, parts = None, 0
for chunk in caller.stream(QUESTION):
    parts += len(chunk.tool_call_chunks)
    called_streamed = chunk if called_streamed is None else called_streamed + chunk
turn = [("user", QUESTION), AIMessage("", tool_calls=called.tool_calls)]
answered = chat.invoke([*turn, ToolMessage("rain", tool_call_id=called.tool_calls[0]["id"])])

completion = OpenAI(max_tokens=5, **COMMON)
texts = completion.generate([f"Number {number}," for number in range(20)])

try:
    chat.invoke("word " * 9000)
    overflow = None
except Exception as error:  # noqa: BLE001 - which one it is, is the question
    overflow = [one.__name__ for one in type(error).__mro__]

print(
    json.dumps(
        {
            "whole": whole.content,
            "finish": whole.response_metadata["finish_reason"],
            "usage": whole.usage_metadata["total_tokens"],
            "streamed": streamed.content,
            "streamed_usage": streamed.usage_metadata["total_tokens"],
            "asynchronous": asyncio.run(chat.ainvoke(QUESTION)).content,
            "batch": [one.content for one in batch],
            "structured": structured,
            "called": [(call["name"], call["args"]) for call in called.tool_calls],
            "called_streamed": [(call["name"], call["args"]) for call in called_streamed.tool_calls],
            "parts": parts,
            "answered": answered.content,
            "completion": completion.invoke("One, two, three,"),
            "texts": [one[0].text for one in texts.generations],
            "overflow": overflow,
        }
    )
)

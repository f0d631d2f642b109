"""What litellm gets from a server, as JSON. Runs in litellm's own environment; argument: the base URL."""

import asyncio
import json
import sys

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"api_base": sys.argv[1], "api_key": "k", "messages": QUESTION, "temperature": 0, "max_tokens": 20}
CITY = {"type": "object", "properties": {"name": {"enum": ["Paris", "Rome"]}}, "required": ["name"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
FORCED = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "max_tokens": 60}


def failure(**fields):
    try:
        litellm.completion(**ASK | {"model": "openai/smollm2-135m", "num_retries": 0} | fields)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__
    return None


def ask(model):
    whole = litellm.completion(model=model, **ASK)
    chunks = list(litellm.completion(model=model, stream=True, stream_options={"include_usage": True}, **ASK))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    called = litellm.completion(model=model, **ASK | FORCED)
    parts = list(litellm.completion(model=model, stream=True, **ASK | FORCED))
    calls = litellm.stream_chunk_builder(parts, messages=QUESTION).choices[0].message.tool_calls
    return {
        "whole": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": whole.usage.total_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "rebuilt": rebuilt.choices[0].message.content,
        "rebuilt_usage": rebuilt.usage.total_tokens,
        "asynchronous": asyncio.run(litellm.acompletion(model=model, **ASK)).choices[0].message.content,
        "called": [(call.function.name, call.function.arguments) for call in called.choices[0].message.tool_calls],
        "called_streamed": [(call.function.name, call.function.arguments) for call in calls],
    }


text = litellm.text_completion(
    model="text-completion-openai/smollm2-135m",
    prompt="One, two, three,",
    **{name: ASK[name] for name in ("api_base", "api_key", "temperature")},
    max_tokens=5,
)
print(
    json.dumps(
        {
            "openai": ask("openai/smollm2-135m"),
            "hosted_vllm": ask("hosted_vllm/smollm2-135m"),
            "text": text.choices[0].text,
            "overflow": failure(messages=[{"role": "user", "content": "word " * 9000}]),
            "bad": failure(temperature=5),
            "missing": failure(model="openai/other"),
        }
    )
)

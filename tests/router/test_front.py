"""Good requests, through the clients that people use."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_generator import deltas
from front_harness import CONTEXT, MODEL, Front

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = " Paris, the capital — 東京 👩‍👩‍👧 e\u0301 done.\n"
HELLO = [{"role": "user", "content": "Hello"}]


async def frames(front: Front, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON frames of a stream; checks the framing and the closing ``[DONE]``."""
    response = await front.http.post(path, json={"stream": True} | body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def test_c8_a_completion(front: Front) -> None:
    ids = front.replay(TEXT, "stop", cached=2)
    answer = await front.client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=64)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint == "fp"
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [(0, TEXT, "stop")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(front.generator.seen[0].prompt_token_ids) == 5
    assert answer.usage.completion_tokens == len(ids)
    assert answer.usage.total_tokens == 5 + len(ids)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_c8_a_chat(front: Front) -> None:
    front.replay(TEXT, "stop")
    answer = await front.client.chat.completions.create(model=MODEL, messages=HELLO)  # type: ignore[arg-type]
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", TEXT, "stop")
    generation = front.generator.seen[0]
    assert generation.sampling.max_tokens == CONTEXT - len(generation.prompt_token_ids)
    assert generation.sampling.stop_token_ids == front.tokenizer.eos_token_ids
    assert generation.sampling.temperature == 1.0


@pytest.mark.parametrize("per_delta", [1, 3, 1000])
async def test_s4_streams_show_the_same_text(front: Front, per_delta: int) -> None:
    front.replay(TEXT, "stop", per_delta=per_delta)
    shown = ""
    async for chunk in await front.client.completions.create(model=MODEL, prompt="x", stream=True):
        assert chunk.usage is None
        shown += chunk.choices[0].text
    assert shown == TEXT


async def test_s2_s3_the_stream_helper_sees_one_role_and_one_finish(front: Front) -> None:
    ids = front.replay(TEXT, "stop", cached=1)
    options: Any = {"stream_options": {"include_usage": True}}
    async with front.client.chat.completions.stream(model=MODEL, messages=HELLO, **options) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", TEXT, "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ids)


async def test_the_synchronous_client(front: Front) -> None:
    front.replay(TEXT)

    def stream() -> str:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="k") as client:
            chunks = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)  # type: ignore[call-overload]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(stream) == TEXT


async def test_s1_s2_d10_chat_frames(front: Front) -> None:
    front.replay("One two", "length")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": True}}
    seen = await frames(front, "/v1/chat/completions", body)
    assert len({(frame["id"], frame["created"], frame["model"], frame["system_fingerprint"]) for frame in seen}) == 1
    assert {frame["object"] for frame in seen} == {"chat.completion.chunk"}
    assert [choice["delta"] for frame in seen for choice in frame["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "One"},
        {"content": " two"},
    ]
    assert [frame["choices"][0]["finish_reason"] for frame in seen[:-1]] == [None, None, "length"]
    assert seen[-1]["choices"] == []
    assert seen[-1]["usage"]["completion_tokens"] == 2
    assert all("usage" not in frame for frame in seen[:-1])


async def test_s7_usage_in_every_frame(front: Front) -> None:
    front.replay("One two three")
    body = {"prompt": "x", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    seen = await frames(front, "/v1/completions", body)
    assert [frame["usage"]["completion_tokens"] for frame in seen] == [1, 2, 3, 3]


async def test_s2_no_role_before_the_first_token(front: Front) -> None:
    gate = asyncio.Event()
    front.generator.script = [gate, *deltas([100], "length")]
    request = front.http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True})
    opening = asyncio.create_task(request.__aenter__())
    await front.generator.opened.wait()
    assert not opening.done()
    gate.set()
    response = await opening
    assert response.status_code == 200
    await response.aread()
    await request.__aexit__(None, None, None)


@pytest.mark.parametrize("per_delta", [1, 2, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("capital", " Paris, the "),
        (["ris, t", "zzz"], " Pa"),
        ("京 ", " Paris, the capital — 東"),
        (["the capital is", "done"], TEXT[: TEXT.index("done")]),
        ("never", TEXT),
        ("", TEXT),
        ([], TEXT),
        (None, TEXT),
    ],
)
async def test_s6_e1_stop_strings_cut_across_tokens(
    front: Front, stop: Any, shown: str, stream: bool, per_delta: int
) -> None:
    front.replay(TEXT, "stop", per_delta=per_delta)
    body = {"prompt": "x", "stop": stop, "stream": stream}
    if stream:
        choices = [frame["choices"][0] for frame in await frames(front, "/v1/completions", body)]
    else:
        choices = (await front.http.post("/v1/completions", json=body)).json()["choices"]
    assert "".join(choice["text"] for choice in choices) == shown
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    expected = shown != TEXT
    assert (choices[-1]["stop_reason"] is not None) == expected
    if expected and per_delta == 1:
        assert front.generator.num_finished == 0  # closed, not read to its end


async def test_a_stop_string_is_counted_and_the_rest_is_not(front: Front) -> None:
    ids = front.replay("One two three four five", per_delta=5)
    answer = await front.client.completions.create(model=MODEL, prompt="x", stop=" three")
    assert len(ids) == 5
    assert answer.choices[0].text == "One two"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_s5_half_a_character_at_the_end(front: Front) -> None:
    ids = front.tokenizer._backend.encode("🦜", add_special_tokens=False).ids
    assert len(ids) > 1
    front.generator.script = deltas(ids[:-1], "length")
    seen = await frames(front, "/v1/completions", {"prompt": "x"})
    assert [frame["choices"][0]["text"] for frame in seen] == ["\ufffd"]


async def test_q3_eos_first(front: Front) -> None:
    front.replay("", "stop")
    answer = await front.client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    front.replay("", "stop")
    seen = await frames(front, "/v1/chat/completions", {"messages": HELLO})
    assert [frame["choices"][0]["finish_reason"] for frame in seen] == [None, "stop"]


@pytest.mark.parametrize("prompt", [["a", "bb cc"], [[1, 2], [3]]])
async def test_l2_l6_a_list_of_prompts(front: Front, prompt: Any) -> None:
    ids = front.replay("One two")
    answer = await front.client.completions.create(model=MODEL, prompt=prompt)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "One two"), (1, "One two")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(ids)
    assert answer.usage.prompt_tokens == sum(len(seen.prompt_token_ids) for seen in front.generator.seen) == 3
    shown = {0: "", 1: ""}
    for frame in await frames(front, "/v1/completions", {"prompt": prompt}):
        for choice in frame["choices"]:
            shown[choice["index"]] += choice["text"]
    assert shown == {0: "One two", 1: "One two"}


async def test_token_ids_in_and_out(front: Front) -> None:
    ids = front.replay(TEXT, "stop")
    body = {"prompt": [5, 6, 7], "return_token_ids": True}
    choice = (await front.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["prompt_token_ids"], tuple(choice["token_ids"])) == ([5, 6, 7], ids)
    seen = [frame["choices"][0] for frame in await frames(front, "/v1/completions", body)]
    assert seen[0]["prompt_token_ids"] == [5, 6, 7]
    assert tuple(token_id for choice in seen for token_id in choice["token_ids"]) == ids
    chat = (await front.http.post("/v1/chat/completions", json={"messages": HELLO, "return_token_ids": True})).json()
    assert tuple(chat["choices"][0]["token_ids"]) == ids
    assert tuple(chat["prompt_token_ids"]) == front.generator.seen[-1].prompt_token_ids


async def test_sampling_reaches_the_generator(front: Front) -> None:
    front.replay("x")
    body = {
        "prompt": "x",
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": -5,
        "ignore_eos": True,
        "stop_token_ids": [9, 9, 8],
        "cache_salt": "me",
    }
    await front.http.post("/v1/completions", json=body)
    generation = front.generator.seen[0]
    sampling = generation.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.0, 0.5, -5)
    assert sampling.stop_token_ids == (9, 8)
    assert generation.cache_salt == "me"


async def test_l7_the_default_length_of_a_completion(front: Front) -> None:
    front.replay("x")
    await front.http.post("/v1/completions", json={"prompt": "x"})
    await front.http.post("/v1/completions", json={"prompt": [7] * (CONTEXT - 3)})
    assert [seen.sampling.max_tokens for seen in front.generator.seen] == [16, 3]


async def test_c3_an_exact_fit(front: Front) -> None:
    front.replay("x")
    body = {"prompt": [7] * (CONTEXT - 10), "max_tokens": 10}
    assert (await front.http.post("/v1/completions", json=body)).status_code == 200


async def test_c2_c4_l5_what_clients_send_without_meaning_it(front: Front) -> None:
    front.replay("x")
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        "model": "",
        "n": 1,
        "stop": None,
        "logprobs": False,
        "top_logprobs": None,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "tools": None,
        "response_format": {"type": "text"},
        "stream": False,
        "user": "u",
        "metadata": {"a": [1, {"b": None}]},
        "store": True,
        "kv_transfer_params": {"x": 1},
        "unheard_of": [1.5, {"deep": [[[]]]}],
    }
    response = await front.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    prompt = front.tokenizer.decode(front.generator.seen[0].prompt_token_ids)
    assert "system\na\nb" in prompt
    legacy = {"prompt": "x", "best_of": 1, "echo": False, "logprobs": None, "suffix": "", "min_tokens": 0, "top_k": -1}
    assert (await front.http.post("/v1/completions", json=legacy)).status_code == 200


async def test_m1_m3_models(front: Front) -> None:
    listed = await front.client.models.list()
    assert [model.id for model in listed.data] == [MODEL]
    card = await front.client.models.retrieve(MODEL)
    assert (card.object, card.owned_by) == ("model", "baton")
    assert (await front.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == CONTEXT
    with pytest.raises(openai.NotFoundError) as failure:
        await front.client.models.retrieve("org/other")
    assert failure.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models"])
async def test_h1_t1_t3_operators_routes(front: Front, path: str) -> None:
    assert (await front.http.get(path)).status_code == 200
    assert (await front.http.get(path + "/")).status_code == 200
    head = await front.http.head(path)
    assert (head.status_code, head.content) == (200, b"")


async def test_t1_a_trailing_slash_is_no_redirect(front: Front) -> None:
    front.replay("x")
    assert (await front.http.post("/v1/completions/", json={"prompt": "x"})).status_code == 200


async def test_t10_request_ids_are_echoed_if_they_are_harmless(front: Front) -> None:
    for offered, kept in (("abc-1_2.3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ('"', False)):
        echoed = (await front.http.get("/health", headers={"x-request-id": offered})).headers["x-request-id"]
        assert (echoed == offered) == kept
    front.replay("x")
    raw = await front.client.completions.with_raw_response.create(
        model=MODEL, prompt="x", extra_headers={"x-request-id": "same"}
    )
    assert raw.headers["x-request-id"] == "same"
    assert "same" not in raw.parse().id


async def test_x1_metrics(front: Front) -> None:
    front.replay("One two three", cached=1)
    ok = front.metrics.count("completions", "ok")
    await front.http.post("/v1/completions", json={"prompt": "x"})
    assert front.metrics.count("completions", "ok") == ok + 1
    response = await front.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for name in ("requests_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"):
        assert f"baton_router_{name}" in response.text

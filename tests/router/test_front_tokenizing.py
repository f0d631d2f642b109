"""``/tokenize``, ``/detokenize``, ``/tokenizer_info``, and the small routes that clients and balancers ask."""

from __future__ import annotations

import random
from typing import Any

import pytest
from front_harness import CONTEXT, MODEL, Front

from router.generation import Readiness

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["Hello", "", "  a  b\n\n", "東京 👩‍👩‍👧", "<|im_start|>user\n<|im_end|>", "x" * 900]


@pytest.mark.parametrize("text", TEXTS)
async def test_k1_there_and_back(front: Front, text: str) -> None:
    answer = (await front.http.post("/tokenize", json={"prompt": text, "model": MODEL})).json()
    assert answer["tokens"] == front.tokenizer._backend.encode(text).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    back = (await front.http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": text}


async def test_k1_strings_and_special_tokens(front: Front) -> None:
    body = {"prompt": "<|im_start|>a b", "return_token_strs": True, "add_special_tokens": False}
    answer = (await front.http.post("/tokenize", json=body)).json()
    assert answer["token_strs"] == ["<|im_start|>", "a", " b"]


async def test_l5_a_chat_counts_what_it_costs(front: Front) -> None:
    rng = random.Random(1)
    for _ in range(20):
        messages = [
            {
                "role": rng.choice(["system", "user", "assistant"]),
                "content": "東京 a\n"[: rng.randint(0, 5)] * rng.randint(1, 9),
            }
            for _ in range(rng.randint(1, 5))
        ]
        front.replay("x")
        counted = (await front.http.post("/tokenize", json={"messages": messages})).json()
        usage = (await front.http.post("/v1/chat/completions", json={"messages": messages})).json()["usage"]
        assert counted["count"] == usage["prompt_tokens"]
        assert tuple(counted["tokens"]) == front.generator.seen[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [], "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": [], "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * (CONTEXT + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_k1_refusals(front: Front, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = await front.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b'"x"', b"1", b"{", b'{"prompt": "\\ud800"}', b'{"tokens": [NaN]}']
)
async def test_h7_bodies_that_are_no_object(front: Front, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert (await front.http.post(path, content=content, headers=headers)).status_code == 400
    assert (await front.http.post(path, content=content, headers={"content-type": "text/plain"})).status_code == 415


async def test_k1_tokenizer_info_for_lm_eval(front: Front) -> None:
    info = (await front.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["vocab_size"] == 49152
    assert "im_start" in info["chat_template"]


async def test_j20_models_are_listed_once_nodes_were_ready(front: Front) -> None:
    """And stay listed when a node is lost (J2): the router answers from what it knows."""
    assert len((await front.http.get("/v1/models")).json()["data"]) == 1
    front.generator.readiness = Readiness(False, "no decode node is alive")
    assert len((await front.http.get("/v1/models")).json()["data"]) == 1
    assert (await front.http.get(f"/v1/models/{MODEL}")).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions", "/tokenize"])
async def test_t3_p18_options_allow_no_other_origin(front: Front, path: str) -> None:
    headers = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await front.http.options(path, headers=headers)
    assert (response.status_code, response.content) == (204, b"")
    assert "OPTIONS" in response.headers["allow"]
    assert not [name for name in response.headers if name.startswith("access-control-")]


async def test_t1_slashes_on_every_route(front: Front) -> None:
    front.replay("x")
    for path, body in (
        ("/v1/chat/completions/", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize/", {"prompt": "a"}),
        ("/detokenize/", {"tokens": [5]}),
    ):
        assert (await front.http.post(path, json=body)).status_code == 200
    for path in ("/tokenizer_info/", "/openapi.json/", f"/v1/models/{MODEL}/"):
        assert (await front.http.get(path)).status_code == 200

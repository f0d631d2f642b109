"""The sampler's options over HTTP, token 0 on the prefill node and the others on the decode node alike."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import tokenizers

from tests.api.conftest import LogSoftmax, gather_posts
from tests.system.oracle import NEAR_TIE
from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

PROMPT = "Once upon a time there was a"
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
EOS = 2


def ids(http: httpx.Client, **fields: Any) -> list[int]:
    """Generated ids of one completion."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_token_ids": True} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def test_logit_bias_forces_and_forbids_every_token(http: httpx.Client) -> None:
    assert ids(http, logit_bias={"262": 100}) == [262] * 6
    plain = ids(http)
    changed = ids(http, logit_bias={str(token_id): -100 for token_id in plain})
    assert not set(plain) & set(changed)


def test_allowed_token_ids_are_all_there_is(http: httpx.Client) -> None:
    assert set(ids(http, allowed_token_ids=[300, 301], **SAMPLED)) <= {300, 301}
    assert ids(http, allowed_token_ids=[300]) == [300] * 6


def test_f1_options_that_leave_one_token_still_give_finite_logprobs(http: httpx.Client) -> None:
    for fields in ({"allowed_token_ids": [300]}, {"top_k": 1}, {"logit_bias": {"300": -100}}):
        body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 20, "echo": True} | fields
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200
        assert "Infinity" not in response.text
        assert "NaN" not in response.text


def test_top_k_1_is_greedy_whatever_the_temperature(http: httpx.Client) -> None:
    assert ids(http, top_k=1, temperature=2.0, seed=3) == ids(http)
    assert ids(http, min_p=1.0, temperature=2.0, seed=3) == ids(http)
    assert ids(http, top_p=1e-9, temperature=2.0, seed=3) == ids(http)


def test_q5_a_seed_repeats_itself_alone_and_among_others(stack: Stack, http: httpx.Client) -> None:
    alone = {seed: ids(http, **SAMPLED | {"seed": seed}) for seed in (0, -1, 2**63 - 1, 7)}
    assert len({tuple(one) for one in alone.values()}) == 4
    bodies = [
        {"prompt": PROMPT, "return_token_ids": True, **SAMPLED, "seed": seed} for seed in [*alone, *alone, *alone]
    ]
    answers = asyncio.run(gather_posts(stack, "/v1/completions", bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"][0]["token_ids"] == alone[body["seed"]]


@pytest.mark.parametrize(("frequency", "presence"), [(0.0, 0.0), (2.0, 0.0), (0.0, 2.0), (-2.0, 1.0)])
def test_penalties_are_subtracted_from_token_0_on(
    http: httpx.Client,
    text_tokenizer: tokenizers.Tokenizer,
    log_softmax: LogSoftmax,
    frequency: float,
    presence: float,
) -> None:
    """Greedy among a few tokens, as Hugging Face's own values less the penalties give it."""
    allowed = [216, 260, 275, 392, 506]
    sequence, wanted = text_tokenizer.encode(PROMPT, add_special_tokens=False).ids, []
    for _ in range(8):
        values = log_softmax([*sequence, *wanted])[-1]
        left = {t: values[t].item() - frequency * wanted.count(t) - presence * (t in wanted) for t in allowed}
        first, second = sorted(left.values(), reverse=True)[:2]
        assert first - second > NEAR_TIE
        wanted.append(max(left, key=lambda token_id: left[token_id]))
    options = {"frequency_penalty": frequency, "presence_penalty": presence}
    assert ids(http, allowed_token_ids=allowed, max_tokens=8, **options) == wanted


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"n": 3, "temperature": 1.0, "seed": 4}])
def test_bad_words_are_never_written(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, options: dict[str, Any]
) -> None:
    """Of one token or more, from token 0 (made on P) to the last (made on D)."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "return_token_ids": True} | options

    def written(**fields: Any) -> list[list[int]]:
        response = http.post("/v1/completions", json=body | fields)
        assert response.status_code == 200, response.text
        return [choice["token_ids"] for choice in response.json()["choices"]]

    plain = written()
    (first, *_), (*_, last) = plain[0], plain[-1]
    pairs = [tuple(found[place : place + 2]) for found in plain for place in range(0, 12, 3)]
    singles = [text_tokenizer.decode([token_id]) for token_id in (first, last)]
    words = [*singles, *(text_tokenizer.decode(list(pair)) for pair in pairs)]
    changed = written(bad_words=words)
    assert changed != plain
    banned = [
        text_tokenizer.encode(blank + word.lstrip(), add_special_tokens=False).ids
        for word in words
        for blank in ("", " ")
    ]
    for found in changed:
        for word in banned:
            assert all(found[place : place + len(word)] != word for place in range(len(found)))


def test_a_bad_word_of_several_tokens_forbids_the_last_of_them_only(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, log_softmax: LogSoftmax
) -> None:
    """Greedy: the same up to the word's last token, then the next likeliest, as Hugging Face has it."""
    plain = ids(http, max_tokens=8)
    for place in (1, 4):
        word = plain[place - 1 : place + 1]
        text = text_tokenizer.decode(word)
        assert text_tokenizer.encode(text, add_special_tokens=False).ids == word
        asked = text_tokenizer.encode(PROMPT, add_special_tokens=False).ids
        likeliest = log_softmax([*asked, *plain[:place]])[-1].topk(2).indices.tolist()
        assert likeliest[0] == plain[place]
        found = ids(http, max_tokens=place + 1, bad_words=[text])
        assert found == [*plain[:place], likeliest[1]]


def test_a_prompt_that_is_cut_answers_as_its_end_alone(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer
) -> None:
    end = text_tokenizer.encode(PROMPT, add_special_tokens=False).ids[-5:]
    assert ids(http, truncate_prompt_tokens=5) == ids(http, prompt=end)
    assert ids(http, prompt=[*range(300, 400), *end], truncate_prompt_tokens=5) == ids(http, prompt=end)


def test_repetition_penalty_forbids_the_prompts_tokens_too(http: httpx.Client) -> None:
    plain = ids(http, prompt=[300, 301] * 8)
    assert set(plain) & {300, 301}
    found = ids(http, prompt=[300, 301] * 8, repetition_penalty=1e9)
    assert not set(found) & {300, 301}
    assert len(set(found)) == len(found)


def test_g11_min_tokens_holds_the_end_back(http: httpx.Client) -> None:
    """EOS is made the likeliest token by far: from the first token on, but not before ``min_tokens``."""
    eager = {"logit_bias": {str(EOS): 100}, "max_tokens": 9}
    assert ids(http, **eager) == [EOS]
    for min_tokens in (1, 4):
        found = ids(http, **eager, min_tokens=min_tokens)
        assert (len(found), found[-1]) == (min_tokens + 1, EOS)
        assert EOS not in found[:-1]


def test_g10_ignore_eos_goes_on_to_the_length(http: httpx.Client) -> None:
    assert ids(http, logit_bias={str(EOS): 100}, ignore_eos=True, max_tokens=5) == [EOS] * 5


@pytest.mark.parametrize("place", [0, 1, 4])
def test_q3_stop_token_ids_end_the_text_before_them(http: httpx.Client, place: int) -> None:
    plain = ids(http)
    stop = plain[place]
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stop_token_ids": [stop], "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    first = plain.index(stop)
    assert choice["token_ids"] == plain[: first + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("shown", [False, True])
def test_q3_e8_a_stop_string_at_any_token(
    http: httpx.Client, text_tokenizer: tokenizers.Tokenizer, place: int, shown: bool
) -> None:
    """Completed by the first token (made on P), by the first of D, and later."""
    plain = ids(http)
    texts = [text_tokenizer.decode([token_id]) for token_id in plain]
    stop = texts[place]
    whole = "".join(texts)
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stop": stop, "include_stop_str_in_output": shown}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    end = whole.index(stop) + (len(stop) if shown else 0)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (whole[:end], "stop", stop)


def test_special_tokens_show_on_request(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "logit_bias": {"1": 100}, "temperature": 0}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == ""
    shown = http.post("/v1/completions", json=body | {"skip_special_tokens": False}).json()["choices"][0]["text"]
    assert shown == "<|im_start|>" * 3


def test_l2_batches_of_every_kind(http: httpx.Client, text_tokenizer: tokenizers.Tokenizer) -> None:
    texts = ["One two three", "The sky is", "x"]
    of_ids = [text_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    alone = [http.post("/v1/completions", json=body | {"prompt": text}).json() for text in texts]
    for prompt in (texts, of_ids):
        answer = http.post("/v1/completions", json=body | {"prompt": prompt}).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [choice["text"] for choice in answer["choices"]] == [one["choices"][0]["text"] for one in alone]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == sum(one["usage"][name] for one in alone)

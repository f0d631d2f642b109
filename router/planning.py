"""From a decoded request to what will be generated: tokenised, checked against the model and the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from cluster.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from cluster.request import Grammar
from router.choice import TextRules
from router.generation import Generation, Generator
from router.grammars import GrammarChecker
from router.sampling import in_vocabulary, sampling_params
from router.schemas import ChatRequest, CompletionRequest, RequestFields, TokenIds
from router.structured import structure_of
from router.tokenizer import Tokenizer
from router.tool_formats import ToolFormat
from router.tools import ToolUse, shown

DEFAULT_COMPLETION_TOKENS: Final = 16
# Numbers that one answer may hold about its prompts. At the bound their JSON has about 20 MB, as prompt_logprobs 40.
MAX_PROMPT_LOGPROBS: Final = 1 << 19

UsageReport = Literal["none", "last", "every"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, ready to run. With ``n`` choices each, ``generations[i]`` gives choices ``i * n`` and on.

    ``prompt_texts`` are the generations' prompts, where a completion's answer shows or measures them: with ``echo``
    each choice begins with its prompt, otherwise only the offsets of log-probabilities do.
    ``num_prompt_logprobs`` (None: none) are to be told apart from the text, whether or not that shows some of them.
    """

    endpoint: Literal["completions", "chat"]
    generations: tuple[Generation, ...]
    rules: TextRules
    stream: bool
    usage: UsageReport
    return_token_ids: bool
    prompt_texts: tuple[str, ...] = ()
    echo: bool = False
    num_prompt_logprobs: int | None = None


class Planner:
    """Holds what planning needs to know of the model and the nodes."""

    def __init__(
        self,
        served_name: str,
        max_model_len: int,
        tokenizer: Tokenizer,
        generator: Generator,
        tool_format: ToolFormat,
    ) -> None:
        self._served_name = served_name
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._generator = generator
        self._tool_format = tool_format
        self._grammars = GrammarChecker()

    async def completion(self, request: CompletionRequest) -> Plan:
        """Plan a text completion. Raises :class:`InvalidRequestError` and :class:`ModelNotFoundError`."""
        self.check_model(request.model)
        limit = self._limit()
        grammar = await self._grammar(request)
        generations, texts = [], []
        for prompt in request.prompts():
            token_ids = await self._prompt_ids(prompt, request, limit)
            num_choices = 1 if request.max_tokens == 0 else request.num_choices()
            shared = self._limit_of_each(limit, len(token_ids), num_choices)
            room = _room(len(token_ids), request.max_tokens, shared, "prompt")
            in_vocabulary(token_ids, self._tokenizer.vocab_size, "prompt")
            max_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if request.max_tokens is None else request.max_tokens
            generations.append(self._completion(request, token_ids, max_tokens, grammar))
            if request.echo or request.logprobs is not None:
                whole = isinstance(prompt, str) and request.truncate_prompt_tokens is None
                texts.append(await self._prompt_text(prompt if whole else token_ids, request))
        _check_prompt_logprobs(generations, request)
        return Plan(
            endpoint="completions",
            generations=tuple(generations),
            rules=_text_rules(request),
            stream=bool(request.stream),
            usage=_usage_report(request),
            return_token_ids=bool(request.return_token_ids),
            prompt_texts=tuple(texts),
            echo=bool(request.echo),
            num_prompt_logprobs=request.prompt_logprobs,
        )

    async def chat(self, request: ChatRequest) -> Plan:
        """Plan an answer to a conversation. Raises as :meth:`completion` does."""
        self.check_model(request.model)
        limit = self._limit()
        use = request.tool_use()
        wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        token_ids = await self._tokenizer.encode_chat(
            request.conversation(),
            max_tokens=limit,
            tools=None if use is None else [shown(function) for function in use.functions],
            keep=_num_kept(request, limit, wanted or 1),
        )
        shared = self._limit_of_each(limit, len(token_ids), request.num_choices())
        room = _room(len(token_ids), wanted, shared, "messages")
        num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
        sampling = sampling_params(
            request,
            self._tokenizer,
            max_tokens=room if wanted is None else wanted,
            num_logprobs=num_logprobs,
            grammar=await self._grammar(request, use),
        )
        generation = Generation(token_ids, sampling, request.cache_salt or "", request.prompt_logprobs)
        _check_prompt_logprobs((generation,), request)
        return Plan(
            endpoint="chat",
            generations=(generation,),
            rules=self._chat_rules(request, use),
            stream=bool(request.stream),
            usage=_usage_report(request),
            return_token_ids=bool(request.return_token_ids),
            num_prompt_logprobs=request.prompt_logprobs,
        )

    def check_model(self, model: str | None) -> None:
        """No name and an empty one mean the model we serve. Raises :class:`ModelNotFoundError` for another."""
        if model and model != self._served_name:
            raise ModelNotFoundError(
                "The requested model does not exist; GET /v1/models lists what does.", param="model"
            )

    def _limit(self) -> int:
        """Prompt plus output that the model's positions and some node's KV pool can hold."""
        pool = self._generator.max_request_tokens()
        return self._max_model_len if pool is None else min(pool, self._max_model_len)

    def _limit_of_each(self, limit: int, prompt_len: int, num_choices: int) -> int:
        """Prompt plus output of each of several choices: they share the prompt's blocks and a node's pool."""
        if num_choices == 1:
            return limit
        room = self._generator.max_answer_tokens(prompt_len, num_choices)
        return limit if room is None else min(limit, prompt_len + room)

    async def _grammar(self, request: RequestFields, use: ToolUse | None = None) -> Grammar | None:
        wish = use.wish(self._tool_format) if use is not None and use.forced else structure_of(request)
        return None if wish is None else await self._grammars.check(wish)

    def _chat_rules(self, request: ChatRequest, use: ToolUse | None) -> TextRules:
        # An answer that must have some form has that form, and is no call even if it looks like one.
        if use is None or (structure_of(request) is not None):
            return _text_rules(request)
        return replace(_text_rules(request), calls=use.rules(self._tool_format))

    def _completion(
        self, request: CompletionRequest, token_ids: TokenIds, max_tokens: int, grammar: Grammar | None
    ) -> Generation:
        if not token_ids:
            raise InvalidRequestError("`prompt` must not be empty.", param="prompt")
        sampling = sampling_params(
            request, self._tokenizer, max_tokens=max_tokens, num_logprobs=request.logprobs, grammar=grammar
        )
        shown = [request.prompt_logprobs, request.logprobs if request.echo else None]
        of_prompt = max((count for count in shown if count is not None), default=None)
        return Generation(token_ids, sampling, request.cache_salt or "", of_prompt)

    async def _prompt_ids(self, prompt: str | TokenIds, request: CompletionRequest, limit: int) -> TokenIds:
        wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        keep = _num_kept(request, limit, wanted)
        if not isinstance(prompt, str):
            return prompt if keep is None else prompt[-keep:]
        special = request.add_special_tokens is not False
        return await self._tokenizer.encode_prompt(prompt, max_tokens=limit, add_special_tokens=special, keep=keep)

    async def _prompt_text(self, prompt: str | TokenIds, request: CompletionRequest) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._tokenizer.decode_prompt(prompt, show_special=request.skip_special_tokens is False)


def for_tenant(plan: Plan, salt: str | None) -> Plan:
    """The plan with prefix caches of that holder of a key only; unchanged where there are no keys (None)."""
    if salt is None:
        return plan
    # Length first, so that no two pairs of salts make the same text.
    generations = tuple(
        replace(generation, cache_salt=f"{len(salt)}:{salt}{generation.cache_salt}") for generation in plan.generations
    )
    return replace(plan, generations=generations)


def _num_kept(request: RequestFields, limit: int, wanted: int) -> int | None:
    """How many of its last tokens a prompt keeps (None: all), if ``wanted`` tokens are to follow."""
    asked = request.truncate_prompt_tokens
    return max(1, limit - wanted) if asked == -1 else asked


def _room(prompt_len: int, wanted: int | None, limit: int, field: str) -> int:
    """Tokens that can follow the prompt. Raises :class:`ContextLengthError` if ``wanted`` (or one) cannot."""
    room = limit - prompt_len
    if room >= (1 if wanted is None else wanted):
        return room
    asked, least = ("at least 1", 1) if wanted is None else (str(wanted), wanted)
    # Clients tell an overflow by these words, not by the code: both phrases must stay.
    raise ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt_len + least} tokens ({prompt_len} in the {field}, {asked} in the completion). "
        f"Please reduce the length of the {field} or completion. (context_length_exceeded)",
        param=field,
    )


def _check_prompt_logprobs(generations: Sequence[Generation], request: RequestFields) -> None:
    num_values = sum(
        len(generation.prompt_token_ids) * (generation.num_prompt_logprobs + 1) * generation.sampling.num_choices
        for generation in generations
        if generation.num_prompt_logprobs is not None
    )
    if num_values > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        named = "`logprobs` with `echo`" if field == "logprobs" else "`prompt_logprobs`"
        text = f"{named} asks for {num_values} values about the prompts, over {MAX_PROMPT_LOGPROBS}."
        raise InvalidRequestError(f"{text} Send fewer prompts at once.", param=field)


def _text_rules(request: RequestFields) -> TextRules:
    return TextRules(
        stops=request.stops(),
        min_tokens=request.min_tokens or 0,
        show_stop=bool(request.include_stop_str_in_output),
        show_special=request.skip_special_tokens is False,
    )


def _usage_report(request: RequestFields) -> UsageReport:
    options = request.stream_options
    if options is None or not options.include_usage:
        return "none"
    return "every" if options.continuous_usage_stats else "last"

"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...), written like those of a model at hand."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_peagle.training.answers import AnswerConfig, AnswerRun, make_builder
from hf_peagle.training.conversations import ConversationBuilder
from hf_peagle.training.prompts import Prompt, id_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks `/chat/completions` at `url` (ending in `/v1`, as a rule).

    `model` is the served name (empty: the only one the server lists). `concurrency` conversations are in flight;
    a request is retried `retries` times with growing pauses and given up after `timeout` seconds. More than
    `max_failures` failed conversations end the run. With `return_token_ids` the server is asked for the token ids it
    produced (a vLLM extension); otherwise its text is tokenised again, which is the same for nearly all answers.
    """

    url: str
    model: str = ""
    api_key: str = "none"
    concurrency: int = 32
    retries: int = 5
    timeout: float = 600.0
    max_failures: int = 50
    return_token_ids: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r}: must start with http:// or https://, e.g. http://localhost:8000/v1")
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}: must be at least 1")


def fetch_answers(
    endpoint: Endpoint,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    output: str | Path,
    config: AnswerConfig,
    eos_ids: set[int] | None = None,
) -> int:
    """Like `answers.generate_answers`, with the server as the target and `tokenizer` as its tokenizer. Returns the
    number of conversations answered now. Failed conversations are logged, left out and tried again by the next run.

    Raises ImportError without the `openai` package, RuntimeError after too many failures. The repetition guard does
    not apply: the server decides when an answer ends.
    """
    client = _client(endpoint)
    served = endpoint.model or _only_model(client, endpoint)
    if eos_ids is None:
        eos_ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    builder = make_builder(tokenizer, eos_ids, config, "endpoint")
    run = AnswerRun(prompts, output, config)
    failures = tokens = 0
    with run, ThreadPoolExecutor(endpoint.concurrency) as pool:
        flying: dict[Future[list[dict[str, Any]]], Prompt] = {}
        try:
            while run.todo or flying:
                while run.todo and len(flying) < endpoint.concurrency:
                    prompt = run.todo.popleft()
                    flying[pool.submit(_answer, client, served, endpoint, builder, prompt, config)] = prompt
                for future in wait(flying, return_when=FIRST_COMPLETED).done:
                    prompt = flying.pop(future)
                    try:
                        rows = future.result()
                    except Exception as error:
                        # Whatever went wrong with one conversation (network, server, template) must not end the others.
                        failures += 1
                        logger.warning("%s: no answer (%s: %s)", prompt.id, type(error).__name__, error)
                        if failures > endpoint.max_failures:
                            raise RuntimeError(
                                f"more than max_failures={endpoint.max_failures} conversations failed at {endpoint.url} "
                                f"(last: {error}); finished ones are kept, run again when the server is well"
                            ) from error
                        continue
                    tokens += sum(end - begin for row in rows for begin, end in row["response_mask"])
                    run.finish(rows, tokens)
        finally:
            for future in flying:
                future.cancel()
    return run.answered


def _client(endpoint: Endpoint) -> Any:
    try:
        import openai
    except ImportError as error:
        raise ImportError("answers from an endpoint need the openai package: pip install openai") from error
    return openai.OpenAI(base_url=endpoint.url, api_key=endpoint.api_key, max_retries=endpoint.retries, timeout=endpoint.timeout)


def _only_model(client: Any, endpoint: Endpoint) -> str:
    names = [model.id for model in client.models.list()]
    if len(names) != 1:
        raise ValueError(f"model='': {endpoint.url} serves {names[:8]}; name the one that is the target")
    return names[0]


def _answer(client: Any, served: str, endpoint: Endpoint, builder: ConversationBuilder, prompt: Prompt, config: AnswerConfig) -> list[dict[str, Any]]:
    """All turns of one conversation, in order; its rows."""
    conversation = builder.start(prompt)
    turn = 0
    while builder.next_prompt(conversation) is not None:
        turn += 1
        reply = client.chat.completions.create(
            model=served,
            messages=conversation.messages,
            max_tokens=config.max_new_tokens,
            temperature=conversation.sampling["temperature"],
            seed=id_hash(prompt.id, f"tokens/{config.seed}/{turn}") % 2**31,
            **({"extra_body": {"return_token_ids": True}} if endpoint.return_token_ids else {}),
        )
        choice = reply.choices[0]
        finish = "eos" if choice.finish_reason == "stop" else "length"
        token_ids = getattr(choice, "token_ids", None)
        if endpoint.return_token_ids and token_ids:
            builder.add_answer(conversation, list(token_ids), finish)
        elif not builder.add_text(conversation, choice.message.content or "", finish):
            # An empty answer, or one the template rewrites: what was answered before it is still good.
            conversation.messages.pop()
            conversation.pending = deque()
            break
    return builder.rows(conversation)

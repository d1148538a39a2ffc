"""From prompts to token ids and back: conversations that are answered turn by turn, kept as the target saw them."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hf_peagle.training.batch_engine import Request
from hf_peagle.training.prompts import Prompt, id_hash

logger = logging.getLogger(__name__)


@dataclass
class Conversation:
    """A conversation being answered: what was said, the tokens of the current part and the rows of earlier parts.

    `text` is what `input_ids` spell, as the chat template wrote it, without a trailing end-of-sequence token.
    """

    prompt: Prompt
    sampling: dict[str, Any]
    pending: deque[dict[str, str]] = field(default_factory=deque)
    messages: list[dict[str, str]] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


class ConversationBuilder:
    """Turns prompts into the tokens of the next turn, takes answers in, and writes finished conversations as rows.

    `sampling` is what the rows record about how answers were made. Raises ValueError for a tokenizer without a chat
    template.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_ids: set[int],
        max_prompt_tokens: int = 1024,
        max_turns: int = 4,
        sampling: dict[str, Any] | None = None,
        temperature: float = 0.0,
        temperature_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer has no chat template; set tokenizer.chat_template to the target's")
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.max_prompt_tokens, self.max_turns = max_prompt_tokens, max_turns
        self.sampling = sampling or {}
        self.temperature, self.temperature_fraction, self.seed = temperature, temperature_fraction, seed

    def start(self, prompt: Prompt, keep_answers: bool = False) -> Conversation:
        """A new conversation: the system message and at most `max_turns` user turns, with `keep_answers` also what
        the assistant (or a tool) says between them."""
        sampled = id_hash(prompt.id, f"temperature/{self.seed}") / 2**63 < self.temperature_fraction
        sampling = {"temperature": self.temperature if sampled else 0.0, "seed": self.seed, **self.sampling}
        conversation = Conversation(prompt, sampling)
        users = 0
        for message in prompt.messages:
            users += message["role"] == "user"
            if users > self.max_turns:
                break
            if keep_answers or message["role"] in ("system", "user"):
                conversation.pending.append(message)
        return conversation

    def next_prompt(self, conversation: Conversation) -> list[int] | None:
        """Moves on to the next user turn; the tokens the target reads before it answers, or None when no turn is left
        or the prompt exceeds `max_prompt_tokens`. Spoken by another role, messages before the turn are read along."""
        while conversation.pending:
            message = conversation.pending.popleft()
            conversation.messages.append(dict(message))
            if message["role"] == "user":
                return self.prompt_ids(conversation)
        return None

    def prompt_ids(self, conversation: Conversation) -> list[int] | None:
        """Tokens of the conversation so far with the template's opening of an answer; None when too many."""
        text = self._render(conversation.messages, opened=True)
        continued = self._continued(conversation, text)
        ids = self._encode(text) if continued is None else continued
        if len(ids) > self.max_prompt_tokens:
            conversation.messages.pop()
            conversation.pending.clear()
            return None
        if continued is None and conversation.spans:
            self._close_part(conversation, conversation.messages[:-1])
        conversation.input_ids, conversation.text = ids, text
        return ids

    def next_request(self, conversation: Conversation, max_new_tokens: int) -> Request | None:
        """`next_prompt` as a request for an engine, seeded by the conversation's id and the number of the turn."""
        ids = self.next_prompt(conversation)
        if ids is None:
            return None
        turn = sum(message["role"] == "user" for message in conversation.messages)
        seed = id_hash(conversation.prompt.id, f"tokens/{self.seed}/{turn}")
        return Request(list(ids), max_new_tokens, conversation.sampling["temperature"], seed, conversation)

    def add_answer(self, conversation: Conversation, output_ids: list[int], finish: str, text: str | None = None) -> None:
        """Takes the target's answer in, as tokens (the end-of-sequence token included if produced). `text` is given
        when the answer came as text; otherwise it is decoded. A repetitive answer is the conversation's last."""
        ended = bool(output_ids) and output_ids[-1] in self.eos_ids
        if text is None:
            kept = output_ids[:-1] if ended else output_ids
            text = self.tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        begin = len(conversation.input_ids)
        conversation.input_ids = conversation.input_ids + output_ids
        conversation.spans.append([begin, begin + len(output_ids)])
        conversation.finish.append(finish)
        conversation.messages.append({"role": "assistant", "content": text})
        conversation.text += text
        if finish == "repetition":
            conversation.pending.clear()

    def add_text(self, conversation: Conversation, content: str, finish: str = "eos") -> bool:
        """Takes an answer given as text in, as the tokens the template makes of it, with the end-of-sequence token
        where the template ends an answer with one and `finish` is "eos". False when the template does not write
        `content` after its own opening of an answer, so that its tokens cannot be told apart."""
        closed = self._render([*conversation.messages, {"role": "assistant", "content": content}], opened=False)
        if not closed.startswith(conversation.text):
            return False
        tail = closed[len(conversation.text) :]
        written = next((c for c in (content, content.strip()) if c and tail.startswith(c)), None)
        if written is None:
            return False
        output = self._encode(written)
        rest = tail[len(written) :]
        if finish == "eos":
            eos = [i for i in sorted(self.eos_ids) if rest.startswith(self._eos_text(i))]
            output += eos[:1]
            finish = "eos" if eos else "given"
        self.add_answer(conversation, output, finish, written)
        return True

    def rows(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The finished conversation's rows; empty when nothing was answered."""
        if conversation.spans:
            self._close_part(conversation, conversation.messages)
        return conversation.rows

    # ------------------------------------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, str]], opened: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)

    def _encode(self, text: str) -> list[int]:
        # Templates write their own special tokens, the beginning-of-sequence token included.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _eos_text(self, token: int) -> str:
        # Never "", which any text would start with.
        return self.tokenizer.decode([token], skip_special_tokens=False) or "\0"

    def _continued(self, conversation: Conversation, text: str) -> list[int] | None:
        """Tokens of `text` that begin with those the target has already read and produced; None when the template now
        writes the earlier turns differently."""
        if not conversation.input_ids or not text.startswith(conversation.text):
            return None
        tail = text[len(conversation.text) :]
        last = conversation.input_ids[-1]
        if last in self.eos_ids and conversation.spans and conversation.spans[-1][1] == len(conversation.input_ids):
            if not tail.startswith(self._eos_text(last)):
                return None
            tail = tail[len(self._eos_text(last)) :]
        return conversation.input_ids + self._encode(tail)

    def _close_part(self, conversation: Conversation, messages: list[dict[str, str]]) -> None:
        conversation.rows.append(
            {
                "id": conversation.prompt.id,
                "source": conversation.prompt.source,
                "part": len(conversation.rows),
                "messages": [dict(m) for m in messages],
                "input_ids": conversation.input_ids,
                "response_mask": conversation.spans,
                "finish": conversation.finish,
                "sampling": conversation.sampling,
            }
        )
        conversation.input_ids, conversation.spans, conversation.finish, conversation.text = [], [], [], ""

"""The target's own answers to prompts, written as resumable JSONL shards: the text a draft head is trained on.

Every line of a shard is one conversation (or one part of it, see below):

    {"id", "source", "part", "messages": [{"role", "content"}], "input_ids": [int], "response_mask": [[start, end)],
     "finish": ["eos" | "length" | "repetition"], "sampling": {...}}

`input_ids` are the conversation's tokens exactly as the target read and produced them; `response_mask` lists the
half-open spans the target produced, the end-of-sequence token included when it was produced. Some chat templates
change earlier answers when a turn is added (they drop reasoning, say): the tokens of the next turn then no longer
continue the earlier ones, and the conversation goes on in a further line with `part` + 1 whose spans cover only the
new answers.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_peagle.training.batch_engine import RepetitionGuard, Request, make_engine
from hf_peagle.training.prompts import Prompt, id_hash, take_shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerConfig:
    """How answers are generated.

    `temperature_fraction` of the conversations are sampled at `temperature`, the rest is greedy; which ones, and
    their random numbers, follow from `seed` and the conversation's id. Lengths are in tokens: conversations whose
    prompt exceeds `max_prompt_tokens` are skipped (a later turn that exceeds it ends the conversation), an answer
    ends after `max_new_tokens`. `slots` conversations are decoded together. `shard_size` finished conversations
    make one file; `shard_index` of `num_shards` says which part of the prompts this process answers. Within windows of
    `length_window` conversations, prompts are answered in order of length, alternately rising and falling, so that
    those decoded together are about equally long (1 keeps the given order).
    """

    max_prompt_tokens: int = 1024
    max_new_tokens: int = 512
    max_turns: int = 4
    temperature: float = 0.8
    temperature_fraction: float = 0.0
    seed: int = 0
    slots: int = 64
    shard_size: int = 100
    length_window: int = 1024
    shard_index: int = 0
    num_shards: int = 1
    repetition_guard: bool = True
    repetition_window: int = 64
    repetition_max_period: int = 16

    def __post_init__(self) -> None:
        for name in ("max_prompt_tokens", "max_new_tokens", "max_turns", "slots", "shard_size", "length_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not 0.0 <= self.temperature_fraction <= 1.0:
            raise ValueError(f"temperature_fraction={self.temperature_fraction}: a share, so between 0 and 1")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: must be above 0; for greedy answers set temperature_fraction=0")

    @property
    def guard(self) -> RepetitionGuard | None:
        """The repetition guard these options ask for."""
        return RepetitionGuard(self.repetition_window, self.repetition_max_period) if self.repetition_guard else None


def default_dtype() -> torch.dtype:
    """bf16 on GPUs and on CPUs that multiply bf16 natively (avx512_bf16, AMX), else fp32."""
    if torch.cuda.is_available():
        return torch.bfloat16
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="ignore")
    except OSError:
        return torch.float32
    return torch.bfloat16 if ("avx512_bf16" in flags or "amx_bf16" in flags) else torch.float32


def eos_token_ids(model: Any, tokenizer: Any) -> set[int]:
    """The ids that end an answer: the generation config's and the tokenizer's."""
    ids: set[int] = set()
    for found in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if isinstance(found, int):
            ids.add(found)
        elif found is not None:
            ids.update(int(i) for i in found)
    return ids


# ----------------------------------------------------------------------------------------------------------- shards


class ShardWriter:
    """Collects rows and writes them as `answers-<process>-<number>.jsonl`, whole files only (temporary + os.replace)."""

    def __init__(self, folder: Path, prefix: str, shard_size: int) -> None:
        self.folder, self.prefix, self.shard_size = folder, prefix, shard_size
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [int(p.stem.rsplit("-", 1)[1]) for p in folder.glob(f"{prefix}-*.jsonl")]
        self.number = max(numbers, default=-1) + 1
        self._lines: list[str] = []
        self._conversations = 0

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Adds the rows of one finished conversation; they stay in one file."""
        self._lines += [json.dumps(row, ensure_ascii=False) for row in rows]
        self._conversations += 1
        if self._conversations >= self.shard_size:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected, if anything."""
        if not self._lines:
            return
        path = self.folder / f"{self.prefix}-{self.number:06d}.jsonl"
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            file.write("\n".join(self._lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        self._lines, self._conversations, self.number = [], 0, self.number + 1


def read_answers(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All rows of all finished shards of a folder, in the order of the file names."""
    for path in sorted(Path(folder).glob("answers-*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: no JSON ({error}); delete the file, its rows are redone") from error


def finished_ids(folder: str | Path) -> set[str]:
    """The ids of the conversations already in a folder's shards."""
    return {row["id"] for row in read_answers(folder)}


# ---------------------------------------------------------------------------------------------------- conversations


@dataclass
class Conversation:
    """A conversation being answered: what was said, the tokens of the current part and the rows of earlier parts."""

    prompt: Prompt
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    pending: deque[dict[str, str]] = field(default_factory=deque)
    input_ids: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)


class ConversationBuilder:
    """Turns prompts into requests, answers into the next turn's request, and finished conversations into rows."""

    def __init__(self, tokenizer: Any, config: AnswerConfig, eos_ids: set[int]) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer has no chat template; set tokenizer.chat_template to the target's")
        self.tokenizer, self.config, self.eos_ids = tokenizer, config, eos_ids

    def start(self, prompt: Prompt) -> Conversation:
        """A new conversation with the system message and at most `max_turns` user turns still to come."""
        sampled = id_hash(prompt.id, f"temperature/{self.config.seed}") / 2**63 < self.config.temperature_fraction
        conversation = Conversation(prompt, self.config.temperature if sampled else 0.0)
        users = 0
        for message in prompt.messages:
            if message["role"] == "user":
                users += 1
                if users > self.config.max_turns:
                    break
            if message["role"] in ("system", "user"):
                conversation.pending.append(message)
        return conversation

    def next_request(self, conversation: Conversation) -> Request | None:
        """The request for the next user turn; None when no turn is left or the prompt is too long."""
        while conversation.pending:
            message = conversation.pending.popleft()
            conversation.messages.append(dict(message))
            if message["role"] == "user":
                break
        else:
            return None
        text = self.tokenizer.apply_chat_template(conversation.messages, tokenize=False, add_generation_prompt=True)
        ids = self._continue(conversation, text)
        if len(ids) > self.config.max_prompt_tokens:
            conversation.messages.pop()
            return None
        conversation.input_ids, conversation.text = ids, text
        turn = len(conversation.finish) + sum(len(row["finish"]) for row in conversation.rows)
        seed = id_hash(conversation.prompt.id, f"tokens/{self.config.seed}/{turn}")
        return Request(list(ids), self.config.max_new_tokens, conversation.temperature, seed, conversation)

    def _continue(self, conversation: Conversation, text: str) -> list[int]:
        """Token ids of `text`, keeping the tokens the target has already read and produced wherever text allows it."""
        if conversation.input_ids and text.startswith(conversation.text):
            tail = text[len(conversation.text) :]
            if conversation.input_ids[-1] in self.eos_ids:
                eos_text = self.tokenizer.decode([conversation.input_ids[-1]])
                if tail.startswith(eos_text):
                    return conversation.input_ids + self._encode(tail[len(eos_text) :])
            else:
                return conversation.input_ids + self._encode(tail)
        if conversation.input_ids:
            self._close_part(conversation, conversation.messages[:-1])
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        # Templates write their own special tokens, the beginning-of-sequence token included.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def answered(self, request: Request) -> None:
        """Takes a finished request's answer into its conversation."""
        conversation: Conversation = request.payload
        output = request.output_ids
        kept = output[:-1] if output and output[-1] in self.eos_ids else output
        answer = self.tokenizer.decode(kept, skip_special_tokens=True)
        begin = len(request.prompt_ids)
        conversation.input_ids = request.prompt_ids + output
        conversation.spans.append([begin, begin + len(output)])
        conversation.finish.append(request.finish)
        conversation.messages.append({"role": "assistant", "content": answer})
        conversation.text += answer
        if request.finish == "repetition":
            conversation.pending.clear()

    def finish(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The conversation's rows; empty when nothing was answered."""
        if conversation.spans:
            self._close_part(conversation, conversation.messages)
        return conversation.rows

    def _close_part(self, conversation: Conversation, messages: list[dict[str, str]]) -> None:
        config = self.config
        conversation.rows.append(
            {
                "id": conversation.prompt.id,
                "source": conversation.prompt.source,
                "part": len(conversation.rows),
                "messages": [dict(m) for m in messages],
                "input_ids": conversation.input_ids,
                "response_mask": conversation.spans,
                "finish": conversation.finish,
                "sampling": {
                    "temperature": conversation.temperature,
                    "seed": config.seed,
                    "max_new_tokens": config.max_new_tokens,
                    "repetition_guard": asdict(config.guard) if config.guard else None,
                },
            }
        )
        conversation.input_ids, conversation.spans, conversation.finish = [], [], []


# ------------------------------------------------------------------------------------------------------- generation


def order_by_length(prompts: list[Prompt], window: int) -> list[Prompt]:
    """Sorts by length inside windows, alternately rising and falling: neighbours stay alike across window borders."""
    ordered: list[Prompt] = []
    for number, begin in enumerate(range(0, len(prompts), window)):
        ordered += sorted(
            prompts[begin : begin + window],
            key=lambda p: sum(len(m["content"]) for m in p.messages),
            reverse=number % 2 == 1,
        )
    return ordered


def generate_answers(model: Any, tokenizer: Any, prompts: Iterable[Prompt], output: str | Path, config: AnswerConfig) -> int:
    """Answers this process's share of `prompts` with `model` and writes shards into `output`; returns the number of
    conversations answered now. Conversations already in the folder are skipped, so that an interrupted run goes on
    where it was: a kill loses the conversations in flight and those not yet in a shard, which are answered again.
    """
    folder = Path(output)
    prefix = f"answers-p{config.shard_index:03d}of{config.num_shards:03d}"
    writer = ShardWriter(folder, prefix, config.shard_size)
    done = finished_ids(folder)
    mine = take_shard(list(prompts), config.shard_index, config.num_shards)
    todo = deque(order_by_length([p for p in mine if p.id not in done], config.length_window))
    logger.info("%d of this process's %d prompts are left", len(todo), len(mine))
    eos_ids = eos_token_ids(model, tokenizer)
    builder = ConversationBuilder(tokenizer, config, eos_ids)
    followups: deque[Request] = deque()
    answered = skipped = 0

    def feed() -> Request | None:
        nonlocal skipped
        if followups:
            return followups.popleft()
        while todo:
            request = builder.next_request(builder.start(todo.popleft()))
            if request is not None:
                return request
            skipped += 1
            bar.update(1)
        return None

    engine = make_engine(model, eos_ids, config.slots, config.guard)
    with tqdm(total=len(todo), unit="conv", smoothing=0.05, mininterval=2.0) as bar:
        begin = time.monotonic()
        try:
            for request in engine.generate(feed):
                builder.answered(request)
                conversation = request.payload
                following = builder.next_request(conversation)
                if following is not None:
                    followups.append(following)
                    continue
                writer.add(builder.finish(conversation))
                answered += 1
                speed = engine.produced / max(time.monotonic() - begin, 1e-9)
                bar.set_postfix_str(f"{speed:.0f} tok/s, {engine.produced} tok", refresh=False)
                bar.update(1)
        finally:
            writer.flush()
    if skipped:
        logger.warning("%d conversations skipped: longer than max_prompt_tokens=%d", skipped, config.max_prompt_tokens)
    return answered

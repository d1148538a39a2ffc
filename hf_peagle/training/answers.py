"""The target's own answers to prompts, written as resumable JSONL shards: the text a draft head is trained on.

Every line of a shard is one conversation (or one part of it, see below):

    {"id", "source", "part", "messages": [{"role", "content"}], "input_ids": [int], "response_mask": [[start, end)],
     "finish": ["eos" | "length" | "repetition"], "sampling": {...}}

`input_ids` are the conversation's tokens exactly as the target read and produced them; `response_mask` lists the
half-open spans the target produced, the end-of-sequence token included when it was produced. Some chat templates
change earlier answers when a turn is added (they drop reasoning, say): the tokens of the next turn then no longer
continue the earlier ones, and the conversation goes on in a further line with `part` + 1 whose spans cover only the
new answers. `finish` has one entry per span; "given" marks an answer that came as text without an end of its own.

Three sources of answers: a model at hand (`generate_answers`), conversations used as they are
(`use_given_answers`), and a server (`endpoint.fetch_answers`).
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hf_peagle.files import write_text
from hf_peagle.training.batch_engine import RepetitionGuard, Request, make_engine
from hf_peagle.training.conversations import ConversationBuilder
from hf_peagle.training.prompts import Prompt, take_shard

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
    """Collects rows and writes them as `answers-<process>-<number>.jsonl`, whole files only."""

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
        write_text(path, "\n".join(self._lines) + "\n")
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


# ------------------------------------------------------------------------------------------------------------- common


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


def make_builder(tokenizer: Any, eos_ids: set[int], config: AnswerConfig, origin: str) -> ConversationBuilder:
    """The conversation builder for these options; `origin` ("target", "endpoint" or "given") is kept in the rows."""
    recorded: dict[str, Any] = {"origin": origin}
    if origin != "given":
        recorded["max_new_tokens"] = config.max_new_tokens
    if origin == "target":
        recorded["repetition_guard"] = asdict(config.guard) if config.guard else None
    return ConversationBuilder(
        tokenizer,
        eos_ids,
        max_prompt_tokens=config.max_prompt_tokens,
        max_turns=config.max_turns,
        sampling=recorded,
        temperature=config.temperature,
        temperature_fraction=config.temperature_fraction,
        seed=config.seed,
    )


class AnswerRun:
    """What is left to do of a folder of answers, the writer of its shards, and the progress bar. A context manager:
    whatever ends the block, finished conversations are written."""

    def __init__(self, prompts: Iterable[Prompt], output: str | Path, config: AnswerConfig) -> None:
        folder = Path(output)
        prefix = f"answers-p{config.shard_index:03d}of{config.num_shards:03d}"
        self.writer = ShardWriter(folder, prefix, config.shard_size)
        done = finished_ids(folder)
        mine = take_shard(list(prompts), config.shard_index, config.num_shards)
        self.todo = deque(order_by_length([p for p in mine if p.id not in done], config.length_window))
        self.answered = self.skipped = 0
        self._begin = time.monotonic()
        self._limit = config.max_prompt_tokens
        logger.info("%d of this process's %d prompts are left", len(self.todo), len(mine))

    def __enter__(self) -> AnswerRun:
        self._bar = tqdm(total=len(self.todo), unit="conv", smoothing=0.05, mininterval=2.0)
        return self

    def __exit__(self, *exception: object) -> None:
        self.writer.flush()
        self._bar.close()
        if self.skipped:
            logger.warning(
                "%d conversations gave no answer: longer than max_prompt_tokens=%d, or nothing to answer in them",
                self.skipped,
                self._limit,
            )

    def finish(self, rows: list[dict[str, Any]], tokens: int) -> None:
        """Takes in one finished conversation (no rows: skipped); `tokens` were produced in this run so far."""
        if rows:
            self.writer.add(rows)
            self.answered += 1
        else:
            self.skipped += 1
        speed = tokens / max(time.monotonic() - self._begin, 1e-9)
        self._bar.set_postfix_str(f"{speed:.0f} tok/s, {tokens} tok", refresh=False)
        self._bar.update(1)


# ------------------------------------------------------------------------------------------------------------- sources


def generate_answers(model: Any, tokenizer: Any, prompts: Iterable[Prompt], output: str | Path, config: AnswerConfig) -> int:
    """Answers this process's share of `prompts` with `model` and writes shards into `output`; returns the number of
    conversations answered now. Conversations already in the folder are skipped, so that an interrupted run goes on
    where it was: a kill loses the conversations in flight and those not yet in a shard, which are answered again.

    `model` must be in evaluation mode, on its device and in the dtype to decode in (see `default_dtype`).
    """
    eos_ids = eos_token_ids(model, tokenizer)
    builder = make_builder(tokenizer, eos_ids, config, "target")
    run = AnswerRun(prompts, output, config)
    if not run.todo:
        return 0
    engine = make_engine(model, eos_ids, config.slots, config.guard)
    followups: deque[Request] = deque()

    def feed() -> Request | None:
        if followups:
            return followups.popleft()
        while run.todo:
            request = builder.next_request(builder.start(run.todo.popleft()), config.max_new_tokens)
            if request is not None:
                return request
            run.finish([], engine.produced)
        return None

    with run:
        for request in engine.generate(feed):
            conversation = request.payload
            builder.add_answer(conversation, request.output_ids, request.finish)
            following = builder.next_request(conversation, config.max_new_tokens)
            if following is not None:
                followups.append(following)
            else:
                run.finish(builder.rows(conversation), engine.produced)
    return run.answered


def use_given_answers(tokenizer: Any, prompts: Iterable[Prompt], output: str | Path, config: AnswerConfig, eos_ids: set[int] | None = None) -> int:
    """Writes conversations that already hold the assistant's turns as shards, tokenised by the chat template, every
    assistant turn a response span. Returns the number of conversations written.

    A head learns to predict its target: use this for conversations the target produced, or a head gets worse.
    `eos_ids` default to the tokenizer's.
    """
    if eos_ids is None:
        eos_ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    builder = make_builder(tokenizer, eos_ids, config, "given")
    tokens = 0
    with AnswerRun(prompts, output, config) as run:
        while run.todo:
            conversation = builder.start(run.todo.popleft(), keep_answers=True)
            while conversation.pending:
                message = conversation.pending.popleft()
                if message["role"] == "assistant" and conversation.messages:
                    if builder.prompt_ids(conversation) is None:
                        break
                    if builder.add_text(conversation, message["content"]):
                        continue
                # Read as context: it is no answer, or the template does not show where its tokens begin.
                conversation.messages.append(dict(message))
            rows = builder.rows(conversation)
            tokens += sum(end - begin for row in rows for begin, end in row["response_mask"])
            run.finish(rows, tokens)
    return run.answered

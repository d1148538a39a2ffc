"""Prompts from JSONL files (several public layouts) or a `datasets` name, read strictly and mixed reproducibly."""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """A conversation to answer. `messages` are chat messages ({"role", "content"}); `source` names where it is from."""

    id: str
    source: str
    messages: tuple[dict[str, str], ...]

    @property
    def system(self) -> str | None:
        """The system message, if the conversation begins with one."""
        first = self.messages[0]
        return first["content"] if first["role"] == "system" else None

    @property
    def turns(self) -> list[str]:
        """The user's turns in order."""
        return [m["content"] for m in self.messages if m["role"] == "user"]


@dataclass(frozen=True)
class PromptSource:
    """A file (or `datasets` name) of prompts and its weight in a mixture."""

    location: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> PromptSource:
        """Reads "LOCATION" or "LOCATION=WEIGHT"."""
        location, separator, weight = text.rpartition("=")
        if not separator:
            return cls(text)
        try:
            value = float(weight)
        except ValueError:
            return cls(text)
        if value <= 0:
            raise ValueError(f"prompt source {text!r}: the weight {value} must be above 0; leave the source out instead")
        return cls(location, value)


def parse_record(record: Any, source: str, fallback_id: str) -> Prompt:
    """Turns one decoded JSON record into a Prompt. Raises ValueError saying what is wrong with it.

    Layouts: {"id", "category", "turns": [user turns]}; EAGLE's {"question_id", "category", "turns"};
    {"messages": [{"role", "content"}]} (also under "conversations" with "from"/"value"); {"prompt": text}.
    """
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    if record.get("id") is not None:
        identity = str(record["id"])
    elif record.get("question_id") is not None:
        identity = f"{source}/{record['question_id']}"
    else:
        identity = fallback_id
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise ValueError("'turns' must be a non-empty list of non-empty strings")
        messages = [{"role": "user", "content": turn} for turn in turns]
    elif "messages" in record or "conversations" in record:
        messages = _parse_messages(record.get("messages", record.get("conversations")))
    elif isinstance(record.get("prompt"), str) and record["prompt"].strip():
        messages = [{"role": "user", "content": record["prompt"]}]
    else:
        raise ValueError(f"needs 'turns', 'messages' or 'prompt'; has {sorted(map(str, record))[:8]}")
    return Prompt(identity, source, tuple(messages))


def _parse_messages(raw: Any) -> list[dict[str, str]]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("'messages' must be a non-empty list")
    names = {"human": "user", "gpt": "assistant"}
    messages = []
    for number, item in enumerate(raw):
        if not isinstance(item, dict):
            raise ValueError(f"message {number} is not an object")
        role = item.get("role", item.get("from"))
        role = names.get(role, role) if isinstance(role, str) else role
        content = item.get("content", item.get("value"))
        if role not in ROLES:
            raise ValueError(f"message {number} has role {role!r}; known roles are {ROLES}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} has no text content")
        messages.append({"role": role, "content": content})
    if not any(m["role"] == "user" for m in messages):
        raise ValueError("'messages' has no user turn")
    return messages


def read_jsonl(path: str | Path, max_broken: int = 20) -> Iterator[Prompt]:
    """Reads one prompt a line. A broken line is logged with file and line number and skipped; the line after
    `max_broken` skipped ones raises ValueError. A missing file raises FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompts file {str(path)!r} does not exist; give a JSONL file or a datasets name")
    generic = path.stem in ("prompts", "question", "questions", "train", "data")
    source = path.resolve().parent.name if generic else path.stem
    broken = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield parse_record(json.loads(line.decode("utf-8")), source, f"{source}/line{number}")
            except ValueError as error:
                broken += 1
                logger.warning("%s:%d: skipped, %s", path, number, error)
                if broken > max_broken:
                    raise ValueError(
                        f"{path}:{number}: more than max_broken={max_broken} broken lines (last: {error}); repair the file or raise the limit"
                    ) from error


def read_dataset(name: str, max_broken: int = 20) -> Iterator[Prompt]:
    """Reads "NAME" or "NAME:SPLIT" (default split "train") with the `datasets` package."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"prompts {name!r} is no file, and reading it as a datasets name needs the package: pip install datasets") from error
    path, _, split = name.partition(":")
    source, broken = path.rsplit("/", 1)[-1], 0
    for number, record in enumerate(datasets.load_dataset(path, split=split or "train")):
        try:
            yield parse_record(record, source, f"{source}/{number}")
        except ValueError as error:
            broken += 1
            logger.warning("%s row %d: skipped, %s", name, number, error)
            if broken > max_broken:
                raise ValueError(f"{name} row {number}: more than max_broken={max_broken} broken rows") from error


def read_source(location: str, max_broken: int = 20) -> Iterator[Prompt]:
    """Reads a file (anything with a path separator's file on disk, or ending in .jsonl) or else a datasets name."""
    if Path(location).exists() or location.endswith((".jsonl", ".json")):
        return read_jsonl(location, max_broken)
    return read_dataset(location, max_broken)


def mix_prompts(sources: list[PromptSource], seed: int = 0, max_broken: int = 20) -> list[Prompt]:
    """All prompts of all sources: each source shuffled, then interleaved so that every prefix follows the weights.

    Sources that run out drop out. The order depends only on the files and `seed`. An id that occurs twice is kept
    once when it is the same prompt and prefixed with its source otherwise.
    """
    if not sources:
        raise ValueError("sources is empty: give at least one prompts file")
    queues: list[list[Prompt]] = []
    seen: dict[str, Prompt] = {}
    for index, source in enumerate(sources):
        queue = []
        for prompt in read_source(source.location, max_broken):
            known = seen.get(prompt.id)
            if known is not None:
                if known.messages == prompt.messages:
                    continue
                prompt = Prompt(_unused(f"{prompt.source}:{prompt.id}", seen), prompt.source, prompt.messages)
            seen[prompt.id] = prompt
            queue.append(prompt)
        random.Random(f"{seed}/{index}").shuffle(queue)
        queues.append(queue[::-1])
    # Smooth weighted round robin: the source that is furthest behind its share goes next.
    credit = [0.0] * len(sources)
    mixed: list[Prompt] = []
    while any(queues):
        live = [i for i, queue in enumerate(queues) if queue]
        total = sum(sources[i].weight for i in live)
        for i in live:
            credit[i] += sources[i].weight
        pick = max(live, key=lambda i: credit[i])
        credit[pick] -= total
        mixed.append(queues[pick].pop())
    return mixed


def _unused(name: str, taken: dict[str, Prompt]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}~{number}", number + 1
    return candidate


def id_hash(identity: str, salt: str = "") -> int:
    """A 63-bit number from an id, the same in every process and run."""
    return int.from_bytes(hashlib.sha256(f"{salt}/{identity}".encode()).digest()[:8], "big") >> 1


def take_shard(prompts: list[Prompt], shard_index: int, num_shards: int) -> list[Prompt]:
    """The prompts of one of `num_shards` processes, by the hash of their id: each prompt in exactly one shard, and in
    the same one when files are added or reordered."""
    if num_shards < 1 or not 0 <= shard_index < num_shards:
        raise ValueError(f"shard_index={shard_index}, num_shards={num_shards}: the index must lie in [0, num_shards)")
    return [p for p in prompts if id_hash(p.id, "shard") % num_shards == shard_index]

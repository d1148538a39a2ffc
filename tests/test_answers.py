"""The target's own answers: engines against plain generation, conversations, shards, resuming, endpoint."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_peagle.training import answers as answers_module
from hf_peagle.training.answers import (
    AnswerConfig,
    ShardWriter,
    generate_answers,
    order_by_length,
    read_answers,
    use_given_answers,
)
from hf_peagle.training.batch_engine import (
    Engine,
    PlainEngine,
    RepetitionGuard,
    Request,
    SlotEngine,
    make_engine,
    unsupported_reason,
)
from hf_peagle.training.endpoint import Endpoint, fetch_answers
from hf_peagle.training.prompts import Prompt

from .support.targets import EOS, PAD, VOCAB, tiny_target

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?+-*/=()'"
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
# Writes earlier answers differently once another turn follows, as templates that drop reasoning do.
REWRITING_TEMPLATE = TEMPLATE.replace("{{ m['content'] }}", "{{ '-' if m['role'] == 'assistant' and not loop.last else m['content'] }}")


def letter_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per letter, the ids below VOCAB, <s> and </s> where the tiny targets have BOS and EOS."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *LETTERS, "<unk>"])}
    vocab |= {f"<{i}>": i for i in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = template
    return fast


def prompt(identity: str, *turns: str) -> Prompt:
    return Prompt(identity, "test", tuple({"role": "user", "content": t} for t in turns))


def plain(model: Any, ids: list[int], max_new_tokens: int, eos: set[int]) -> list[int]:
    """What `model.generate` says to one prompt alone."""
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(eos),
        pad_token_id=PAD,
    )
    return output[0, len(ids) :].tolist()


def ragged_requests(count: int, temperature: float = 0.0) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    # Short and long prompts alternate irregularly, so that the buffer has to move for longer ones while it is in use.
    lengths = torch.randint(1, 70, (count,), generator=generator).tolist()
    budgets = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [
        Request(torch.randint(3, VOCAB, (n,), generator=generator).tolist(), b, temperature, seed=i, payload=i)
        for i, (n, b) in enumerate(zip(lengths, budgets, strict=True))
    ]


def answer_all(engine: Engine, requests: list[Request]) -> dict[int, Request]:
    queue = iter(requests)
    return {r.payload: r for r in engine.generate(lambda: next(queue, None))}


# -------------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("slots", [1, 5, 64])
def test_slots_give_the_tokens_of_each_prompt_alone(family: str, slots: int) -> None:
    model = tiny_target(family)
    eos = {EOS, 5, 11, 40}
    engine = make_engine(model, eos, slots)
    assert isinstance(engine, SlotEngine)
    answered = answer_all(engine, ragged_requests(24))
    assert sorted(answered) == list(range(24))
    for request in answered.values():
        assert request.output_ids == plain(model, request.prompt_ids, request.max_new_tokens, eos)
        assert request.finish == ("eos" if request.output_ids[-1] in eos else "length")
    assert {r.finish for r in answered.values()} == {"eos", "length"}
    assert engine.produced == sum(len(r.output_ids) for r in answered.values())
    assert model.config._attn_implementation == "sdpa"


def test_long_answers_move_the_buffer() -> None:
    model = tiny_target("llama")
    requests = [Request([3, 4, 5], 150, payload=0), Request([6] * 40, 20, payload=1), Request([7] * 90, 30, payload=2)]
    for request in answer_all(SlotEngine(model, set(), 2), requests).values():
        assert request.output_ids == plain(model, request.prompt_ids, request.max_new_tokens, set())


def test_requests_that_arrive_late_refill_a_shrunken_batch() -> None:
    model = tiny_target("llama")
    requests = ragged_requests(12)
    ready: list[Request | None] = [*requests[:6], *[None] * 40, *requests[6:]]
    finished = list(SlotEngine(model, {EOS, 11}, 6).generate(lambda: ready.pop(0) if ready else None))
    assert len(finished) >= 6
    for request in finished:
        assert request.output_ids == plain(model, request.prompt_ids, request.max_new_tokens, {EOS, 11})


def test_sampled_answers_do_not_depend_on_their_neighbours() -> None:
    model = tiny_target("llama")
    together = answer_all(SlotEngine(model, {EOS}, 8), ragged_requests(10, temperature=0.9))
    alone = answer_all(SlotEngine(model, {EOS}, 1), ragged_requests(10, temperature=0.9))
    assert {i: r.output_ids for i, r in together.items()} == {i: r.output_ids for i, r in alone.items()}
    greedy = answer_all(SlotEngine(model, {EOS}, 8), ragged_requests(10))
    assert any(greedy[i].output_ids != together[i].output_ids for i in greedy)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_sliding_windows_fall_back_to_generate(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_target(family)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(model, {EOS, 11}, 4)
    assert isinstance(engine, PlainEngine)
    assert "Sliding" in caplog.text
    for request in answer_all(engine, ragged_requests(9)).values():
        assert request.output_ids == plain(model, request.prompt_ids, request.max_new_tokens, {EOS, 11})


def test_a_model_that_ignores_the_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target("llama")
    assert unsupported_reason(model) is None
    decoder = type(model.model)
    forward = decoder.forward

    def blind(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(decoder, "forward", blind)
    assert "other logits" in str(unsupported_reason(model))


def test_repetition_guard() -> None:
    guard = RepetitionGuard(window=64, max_period=16)
    assert not guard.triggered([1] * 63)
    assert guard.triggered([1] * 64)
    assert guard.triggered([9, 8, *list(range(16)) * 4])
    assert not guard.triggered(list(range(17)) * 5)
    assert not guard.triggered([*list(range(16)) * 4, 99])


@pytest.mark.parametrize("engine_type", [SlotEngine, PlainEngine])
def test_repetitive_answers_end_early(engine_type: type[Engine]) -> None:
    model = tiny_target("llama")
    guard = RepetitionGuard(window=12, max_period=12)
    requests = ragged_requests(16)
    for request in requests:
        request.max_new_tokens = 120
    ended = 0
    for request in answer_all(engine_type(model, set(), 4, guard), requests).values():
        whole = plain(model, request.prompt_ids, 120, set())
        assert request.output_ids == whole[: len(request.output_ids)]
        first = next((n for n in range(1, 120) if guard.triggered(whole[:n])), 120)
        assert len(request.output_ids) == first
        ended += request.finish == "repetition"
    assert ended > 0


# -------------------------------------------------------------------------------------------------- answers and folders


def config(**changes: Any) -> AnswerConfig:
    return AnswerConfig(**{"max_new_tokens": 12, "slots": 4, "shard_size": 3, **changes})


def test_turns_are_answered_in_order_with_the_earlier_answers_as_context(tmp_path: Path) -> None:
    model, tokenizer = tiny_target("llama"), letter_tokenizer()
    prompts = [prompt("one", "hello"), prompt("two", "abc", "def", "ghi"), prompt("three", "x" * 40, "y")]
    assert generate_answers(model, tokenizer, prompts, tmp_path, config(max_turns=2)) == 3
    rows = {row["id"]: row for row in read_answers(tmp_path)}
    assert {i: len(row["response_mask"]) for i, row in rows.items()} == {"one": 1, "two": 2, "three": 2}
    for row in rows.values():
        ids = row["input_ids"]
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * len(row["response_mask"])
        for (begin, end), finish in zip(row["response_mask"], row["finish"], strict=True):
            assert ids[begin:end] == plain(model, ids[:begin], 12, {EOS})
            assert finish == ("eos" if ids[end - 1] == EOS else "length")
        assert row["sampling"]["temperature"] == 0.0
        assert row["sampling"]["max_new_tokens"] == 12
        first = tokenizer("<s>user\n" + row["messages"][0]["content"] + "</s>\n<s>assistant\n", add_special_tokens=False)
        assert ids[: row["response_mask"][0][0]] == first["input_ids"]


def test_a_template_that_rewrites_earlier_answers_starts_a_new_part(tmp_path: Path) -> None:
    model, tokenizer = tiny_target("llama"), letter_tokenizer(REWRITING_TEMPLATE)
    generate_answers(model, tokenizer, [prompt("p", "abc", "def")], tmp_path, config())
    first, second = read_answers(tmp_path)
    assert (first["part"], second["part"]) == (0, 1)
    assert [len(row["response_mask"]) for row in (first, second)] == [1, 1]
    expected = "<s>user\nabc</s>\n<s>assistant\n-</s>\n<s>user\ndef</s>\n<s>assistant\n"
    begin, end = second["response_mask"][0]
    assert second["input_ids"][:begin] == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert second["input_ids"][begin:end] == plain(model, second["input_ids"][:begin], 12, {EOS})
    assert len(first["messages"]) == 2
    assert len(second["messages"]) == 4


def test_too_long_prompts_are_skipped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [prompt("long", "x" * 100), prompt("short", "x"), prompt("grows", "x", "y" * 100)]
    with caplog.at_level(logging.WARNING):
        generate_answers(tiny_target("llama"), letter_tokenizer(), prompts, tmp_path, config(max_prompt_tokens=60))
    rows = {row["id"]: row for row in read_answers(tmp_path)}
    assert sorted(rows) == ["grows", "short"]
    assert len(rows["grows"]["response_mask"]) == 1
    assert "1 conversations gave no answer" in caplog.text


def test_a_kill_loses_only_what_is_in_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_target("llama"), letter_tokenizer()
    prompts = [prompt(f"p{i}", chr(97 + i) * (i + 1), "and") for i in range(14)]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = config(temperature_fraction=0.4)
    generate_answers(model, tokenizer, prompts, whole, options)

    class KilledError(BaseException):
        pass

    # Nothing runs after a kill -9: the writer dies at its third file, before the file has its name, and cannot flush.
    flush, calls = ShardWriter.flush, []

    def dying(self: ShardWriter) -> None:
        calls.append(1)
        if len(calls) >= 3:
            (self.folder / f"{self.prefix}-{self.number:06d}.tmp1").write_text('{"id": "p0", "inp')
            raise KilledError
        flush(self)

    monkeypatch.setattr(ShardWriter, "flush", dying)
    with pytest.raises(KilledError):
        generate_answers(model, tokenizer, prompts, resumed, options)
    monkeypatch.undo()
    kept = [row["id"] for row in read_answers(resumed)]
    assert len(kept) == 6
    assert generate_answers(model, tokenizer, prompts, resumed, options) == 8
    rows = {row["id"]: row for row in read_answers(whole)}
    again = list(read_answers(resumed))
    assert sorted(row["id"] for row in again) == sorted(rows)
    # Greedy or sampled, an answer does not depend on when and beside what it was made.
    assert all(rows[row["id"]] == row for row in again)
    assert {row["sampling"]["temperature"] for row in again} == {0.0, 0.8}
    assert generate_answers(model, tokenizer, prompts, resumed, options) == 0


def test_processes_share_a_folder(tmp_path: Path) -> None:
    model, tokenizer = tiny_target("llama"), letter_tokenizer()
    prompts = [prompt(f"p{i}", "abc"[: i % 3 + 1]) for i in range(30)]
    counts = [generate_answers(model, tokenizer, prompts, tmp_path, config(shard_index=i, num_shards=3)) for i in range(3)]
    assert sum(counts) == 30
    assert sorted(row["id"] for row in read_answers(tmp_path)) == sorted(p.id for p in prompts)
    assert {p.name[:17] for p in tmp_path.iterdir()} == {f"answers-p{i:03d}of003" for i in range(3)}


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers-p000of001-000000.jsonl").write_text('{"id": "a"}\n{"id"\n')
    with pytest.raises(ValueError, match=r"000000\.jsonl:2"):
        list(read_answers(tmp_path))


def test_order_by_length_keeps_windows_and_everything() -> None:
    prompts = [prompt(f"p{i}", "x" * (1 + (37 * i) % 50)) for i in range(25)]
    ordered = order_by_length(prompts, 10)
    lengths = [len(p.turns[0]) for p in ordered]
    assert {p.id for p in ordered[:10]} == {p.id for p in prompts[:10]}
    assert lengths[:10] == sorted(lengths[:10])
    assert lengths[10:20] == sorted(lengths[10:20], reverse=True)
    assert sorted(p.id for p in ordered) == sorted(p.id for p in prompts)
    assert order_by_length(prompts, 1) == prompts


@pytest.mark.parametrize("changes", [{"max_new_tokens": 0}, {"temperature_fraction": 1.5}, {"temperature": 0.0}, {"slots": 0}])
def test_bad_options_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))}="):
        AnswerConfig(**changes)


def test_a_missing_chat_template_is_an_error(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        generate_answers(tiny_target("llama"), tokenizer, [prompt("a", "b")], tmp_path, config())


def test_default_dtype_is_one_of_two() -> None:
    assert answers_module.default_dtype() in (torch.bfloat16, torch.float32)


# ------------------------------------------------------------------------------------------------------- given answers


def chat(identity: str, *messages: tuple[str, str]) -> Prompt:
    return Prompt(identity, "test", tuple({"role": r, "content": c} for r, c in messages))


def test_given_conversations_are_tokenised_with_their_spans(tmp_path: Path) -> None:
    tokenizer = letter_tokenizer()
    prompts = [
        chat("a", ("system", "be"), ("user", "hi"), ("assistant", "yo"), ("user", "more"), ("assistant", "ok then")),
        chat("none", ("user", "hi")),
    ]
    assert use_given_answers(tokenizer, prompts, tmp_path, config()) == 1
    (row,) = read_answers(tmp_path)
    spoken = [tokenizer.decode(row["input_ids"][begin:end]) for begin, end in row["response_mask"]]
    assert spoken == ["yo</s>", "ok then</s>"]
    assert row["finish"] == ["eos", "eos"]
    # The template's newline after the last answer is not the target's.
    whole = tokenizer.apply_chat_template(list(prompts[0].messages), tokenize=False)
    assert row["input_ids"] == tokenizer(whole.rstrip("\n"), add_special_tokens=False)["input_ids"]
    assert row["messages"] == list(prompts[0].messages)


def test_given_conversations_equal_generated_ones(tmp_path: Path) -> None:
    """Answers generated as tokens and the same answers given as text make the same rows."""
    tokenizer = letter_tokenizer()
    prompts = [prompt(f"p{i}", LETTERS[i % 60] * (1 + i % 7)) for i in range(120)]
    # Hot sampling: the random target hardly ends a greedy answer.
    hot = config(max_new_tokens=40, temperature=5.0, temperature_fraction=1.0)
    generate_answers(tiny_target("llama"), tokenizer, prompts, tmp_path / "generated", hot)

    def spelled(row: dict[str, Any]) -> bool:
        """Ended by itself and made of letters only: text that spells its tokens."""
        (begin, end), letters = row["response_mask"][0], range(3, 3 + len(LETTERS))
        return row["finish"] == ["eos"] and end - begin > 1 and all(t in letters for t in row["input_ids"][begin : end - 1])

    rows = {r["id"]: r for r in read_answers(tmp_path / "generated") if spelled(r)}
    assert len(rows) >= 3
    given = [Prompt(i, r["source"], tuple(r["messages"])) for i, r in rows.items()]
    use_given_answers(tokenizer, given, tmp_path / "given", config())
    for row in read_answers(tmp_path / "given"):
        assert row["input_ids"] == rows[row["id"]]["input_ids"]
        assert row["response_mask"] == rows[row["id"]]["response_mask"]
        assert row["finish"] == ["eos"]


# ------------------------------------------------------------------------------------------------------------ endpoint


class ChatServer(BaseHTTPRequestHandler):
    """Answers `/v1/chat/completions` with the last user turn reversed; fails as often as `failures` says."""

    seen: list[dict[str, Any]]
    failures: dict[str, int]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        last = body["messages"][-1]["content"]
        if self.failures.get(last, 0) > 0:
            self.failures[last] -= 1
            self._send(500, {"error": {"message": "busy"}})
            return
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": last[::-1]},
            "finish_reason": "length" if last.startswith("long") else "stop",
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = [9, 8, 7, EOS]
        self._send(200, {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[tuple[str, type[ChatServer]]]:
    pytest.importorskip("openai")
    handler = type("Handler", (ChatServer,), {"seen": [], "failures": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}/v1", handler
        http.shutdown()
        thread.join()


def test_endpoint_answers_turn_by_turn(tmp_path: Path, server: tuple[str, type[ChatServer]]) -> None:
    url, handler = server
    tokenizer = letter_tokenizer()
    handler.failures = {"abc": 2}
    prompts = [prompt("a", "abc", "defg"), prompt("b", "long one")]
    assert fetch_answers(Endpoint(url, concurrency=2), tokenizer, prompts, tmp_path, config()) == 2
    rows = {row["id"]: row for row in read_answers(tmp_path)}
    row = rows["a"]
    assert [m["content"] for m in row["messages"]] == ["abc", "cba", "defg", "gfed"]
    assert [tokenizer.decode(row["input_ids"][b:e]) for b, e in row["response_mask"]] == ["cba</s>", "gfed</s>"]
    begin, end = rows["b"]["response_mask"][0]
    assert tokenizer.decode(rows["b"]["input_ids"][begin:end]) == "eno gnol"
    assert rows["b"]["finish"] == ["length"]
    second = next(body for body in handler.seen if len(body["messages"]) == 3)
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert (second["model"], second["max_tokens"], second["temperature"]) == ("tiny", 12, 0.0)
    # Resumed: nothing is asked again.
    asked = len(handler.seen)
    assert fetch_answers(Endpoint(url, model="tiny"), tokenizer, prompts, tmp_path, config()) == 0
    assert len(handler.seen) == asked


def test_endpoint_token_ids_are_taken_as_they_are(tmp_path: Path, server: tuple[str, type[ChatServer]]) -> None:
    endpoint = Endpoint(server[0], return_token_ids=True)
    fetch_answers(endpoint, letter_tokenizer(), [prompt("a", "abc")], tmp_path, config())
    (row,) = read_answers(tmp_path)
    begin, end = row["response_mask"][0]
    assert row["input_ids"][begin:end] == [9, 8, 7, EOS]


def test_endpoint_failures_are_counted_and_retried_next_time(
    tmp_path: Path, server: tuple[str, type[ChatServer]], caplog: pytest.LogCaptureFixture
) -> None:
    url, handler = server
    handler.failures = {"bad": 2, "worse": 2}
    prompts = [prompt("a", "good"), prompt("b", "bad"), prompt("c", "worse")]
    with caplog.at_level(logging.WARNING):
        assert fetch_answers(Endpoint(url, retries=0), letter_tokenizer(), prompts, tmp_path, config()) == 1
    assert "b: no answer" in caplog.text
    with pytest.raises(RuntimeError, match="max_failures=0"):
        fetch_answers(Endpoint(url, retries=0, max_failures=0), letter_tokenizer(), prompts, tmp_path, config())
    handler.failures = {}
    fetch_answers(Endpoint(url, retries=0), letter_tokenizer(), prompts, tmp_path, config())
    assert sorted(row["id"] for row in read_answers(tmp_path)) == ["a", "b", "c"]


def test_endpoint_options_are_checked() -> None:
    with pytest.raises(ValueError, match="url='localhost"):
        Endpoint("localhost:8000")
    with pytest.raises(ValueError, match="concurrency=0"):
        Endpoint("http://x", concurrency=0)

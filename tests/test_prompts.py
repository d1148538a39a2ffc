"""Reading, mixing and splitting prompts."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from hf_peagle.training.prompts import Prompt, PromptSource, mix_prompts, parse_record, read_jsonl, take_shard


def write(path: Path, records: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


def test_all_layouts_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "eagle-math" / "question.jsonl",
        [
            {"id": "a", "category": "x", "turns": ["one", "two"]},
            {"question_id": 7, "category": "", "turns": ["q"], "reference": ["r"]},
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
            {"prompt": "p"},
        ],
    )
    prompts = list(read_jsonl(path))
    assert [p.id for p in prompts] == ["a", "eagle-math/7", "eagle-math/line3", "eagle-math/line4", "eagle-math/line5"]
    assert prompts[0].turns == ["one", "two"]
    assert (prompts[2].system, prompts[2].turns) == ("s", ["u"])
    assert prompts[3].messages == ({"role": "user", "content": "h"}, {"role": "assistant", "content": "g"})
    assert {p.source for p in prompts} == {"eagle-math"}


@pytest.mark.parametrize(
    "record, reason",
    [
        ([1], "JSON object"),
        ({"id": "x"}, "needs 'turns'"),
        ({"turns": []}, "non-empty list"),
        ({"turns": ["ok", 3]}, "non-empty strings"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": None}]}, "no text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
    ],
)
def test_broken_records_say_why(record: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_record(record, "s", "s/1")


def test_broken_lines_are_reported_and_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"id": "g", "turns": ["x"]}
    path = write(tmp_path / "p.jsonl", [good, "{broken", {"id": "h", "turns": []}, {**good, "id": "i"}])
    with caplog.at_level(logging.WARNING):
        assert [p.id for p in read_jsonl(path, max_broken=2)] == ["g", "i"]
    assert f"{path}:2:" in caplog.text
    assert f"{path}:3:" in caplog.text
    with pytest.raises(ValueError, match=r"p\.jsonl:3: more than max_broken=1"):
        list(read_jsonl(path, max_broken=1))
    path.write_bytes(b'{"id": "g", "turns": ["\xff"]}\n')
    with pytest.raises(ValueError, match="max_broken=0"):
        list(read_jsonl(path, max_broken=0))
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        list(read_jsonl(tmp_path / "missing.jsonl"))


def test_mixture_follows_weights_in_every_prefix_and_loses_nothing(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"id": f"a{i}", "turns": [f"{i}"]} for i in range(90)])
    b = write(tmp_path / "b.jsonl", [{"id": f"b{i}", "turns": [f"{i}"]} for i in range(200)])
    sources = [PromptSource(str(a), 3), PromptSource(str(b), 1)]
    mixed = mix_prompts(sources, seed=1)
    for length in range(4, 121):
        assert abs(Counter(p.id[0] for p in mixed[:length])["a"] - 0.75 * length) <= 1
    assert len({p.id for p in mixed}) == len(mixed) == 290
    assert [p.id for p in mix_prompts(sources, seed=1)] == [p.id for p in mixed]
    assert [p.id for p in mix_prompts(sources, seed=2)] != [p.id for p in mixed]


def test_equal_ids_are_told_apart_and_equal_prompts_kept_once(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [{"id": "1", "turns": ["x"]}, {"id": "2", "turns": ["same"]}])
    b = write(tmp_path / "b.jsonl", [{"id": "1", "turns": ["y"]}, {"id": "2", "turns": ["same"]}])
    mixed = mix_prompts([PromptSource(str(a)), PromptSource(str(b))])
    assert {p.id: p.turns for p in mixed} == {"1": ["x"], "2": ["same"], "b:1": ["y"]}


def test_source_text() -> None:
    assert PromptSource.parse("a/b.jsonl") == PromptSource("a/b.jsonl", 1.0)
    assert PromptSource.parse("a=b/c.jsonl=2.5") == PromptSource("a=b/c.jsonl", 2.5)
    assert PromptSource.parse("a=b.jsonl") == PromptSource("a=b.jsonl", 1.0)
    with pytest.raises(ValueError, match="above 0"):
        PromptSource.parse("a.jsonl=0")
    with pytest.raises(ValueError, match="sources is empty"):
        mix_prompts([])


def test_shards_cover_everything_exactly_once() -> None:
    prompts = [Prompt(f"p{i}", "s", ({"role": "user", "content": "x"},)) for i in range(300)]
    shards = [take_shard(prompts, i, 3) for i in range(3)]
    assert sorted(p.id for shard in shards for p in shard) == sorted(p.id for p in prompts)
    assert all(len(shard) > 60 for shard in shards)
    # A prompt stays in its shard when others come and go.
    assert {p.id for p in take_shard(prompts[::-1][:100], 1, 3)} <= {p.id for p in shards[1]}
    with pytest.raises(ValueError, match="shard_index=3"):
        take_shard(prompts, 3, 3)

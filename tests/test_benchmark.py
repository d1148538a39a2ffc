"""The benchmark's arithmetic, records and honesty, on tiny models. No test looks at how long anything took."""

from __future__ import annotations

import copy
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_peagle import benchmark
from hf_peagle.benchmark import BenchmarkOptions, Loaded, run_benchmark
from hf_peagle.benchmark_costs import best_length, interpolate, measure_costs, predict
from hf_peagle.benchmark_methods import Batch, Method, OracleHead, Variant, answers, first_divergence, run_method
from hf_peagle.benchmark_options import parse_arguments
from hf_peagle.benchmark_prompts import EncodedPrompt, conversation_to_answer, select_prompts
from hf_peagle.benchmark_records import Records, command_line
from hf_peagle.benchmark_report import summarise, to_markdown
from hf_peagle.training.prompts import Prompt, parse_record

from .support.heads import random_head
from .support.targets import VOCAB, tiny_target

LENGTHS = (2, 4, "adaptive")


def _encode(prompt: Prompt) -> list[int]:
    return [3 + ord(letter) % (VOCAB - 3) for letter in prompt.turns[0]][:12]


def _load(options: BenchmarkOptions, dtype: str) -> Loaded:
    target = copy.deepcopy(tiny_target("llama")).to(benchmark.DTYPES[dtype])
    return Loaded(target, _encode, random_head(target).to(target.dtype))


def _options(**changes: Any) -> BenchmarkOptions:
    values: dict[str, Any] = {"limit": 4, "max_new_tokens": 12, "num_assistant_tokens": LENGTHS, "runs": 2}
    values.update(cost_sweeps=0, context=32, random_head=True, optimise=False, device="cpu")
    return BenchmarkOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """One small benchmark with everything in it."""
    torch.set_num_threads(1)
    return run_benchmark(_options(batch_size=(1, 2), cost_sweeps=2), _load, command="python scripts/benchmark.py")


# ---------------------------------------------------------------------- a whole run


def test_result_is_complete(result: dict[str, Any]) -> None:
    json.dumps(result)
    for name in ("command", "date", "git_commit", "machine", "target", "drafter", "settings", "prompts", "rows", "sections"):
        assert name in result
    assert {"cpu", "threads", "torch", "transformers"} <= result["machine"].keys()
    assert [(s["dtype"], s["batch_size"]) for s in result["sections"]] == [("fp32", 1), ("fp32", 2)]
    names = [m["method"] for m in result["sections"][0]["methods"]]
    peagle = [f"peagle-{n}@eager" for n in ("k2", "k4", "adaptive")]
    assert sorted(names) == sorted(["plain@eager", "lookup@eager", *peagle, "random-adaptive@eager", "oracle-k4@eager"])
    assert "lookup@eager" not in [m["method"] for m in result["sections"][1]["methods"]]
    for section in result["sections"]:
        for method in section["methods"]:
            assert method["tokens"] == 4 * 12
            assert method["tokens_per_second"] > 0
            assert method["speedup_stock"]["runs"] == 2
            assert set(method["split"]["share_of_round"]) == {"draft", "verify", "other"}
            assert sum(method["split"]["share_of_round"].values()) == pytest.approx(1)
    for row, k in zip(result["rows"], LENGTHS, strict=True):
        wanted = {"acceptance_length", "speedup_median", "speedup_min", "speedup_max", "draft_ms", "verify_ms", "identical"}
        assert row["k"] == k
        assert wanted <= row.keys()
        assert row["speedup_min"] <= row["speedup_median"] <= row["speedup_max"]


def test_every_method_gives_the_tokens_of_plain_decoding(result: dict[str, Any]) -> None:
    for section in result["sections"]:
        for method in section["methods"]:
            assert method["identical"] == method["identical_to_stock"] == "4/4", method["method"]
            assert method["divergences"] == []


def test_the_oracle_is_accepted_whole_and_a_random_head_hardly(result: dict[str, Any]) -> None:
    for section in result["sections"]:
        by_name = {m["method"]: m for m in section["methods"]}
        oracle = by_name["oracle-k4@eager"]
        # 12 tokens: one from the prompt, then 5, 5 and a last round that has room for one.
        assert oracle["acceptance_by_depth"] == [1.0] * 4
        assert oracle["acceptance_length"] == pytest.approx(11 / 3)
        assert oracle["target_forwards_per_token"] == pytest.approx(4 / 12)
        assert by_name["plain@eager"]["target_forwards_per_token"] == pytest.approx(1)
        assert by_name["plain@eager"]["acceptance_length"] in (None, 1.0)  # of a batch, only P-EAGLE tells it
        assert by_name["random-adaptive@eager"]["acceptance_length"] < 2


def test_costs_and_predictions_are_there(result: dict[str, Any]) -> None:
    for section in result["sections"]:
        costs, prediction = section["costs"]["eager"], section["predictions"]["eager"]
        assert costs["context"] == 32
        assert list(costs["verify"]) == [str(q) for q in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)]
        assert list(costs["draft"]) == list(costs["draft_sequential"]) == [str(k) for k in range(1, 9)]
        for entry in (costs["plain"], *costs["verify"].values(), *costs["draft"].values()):
            assert 0 < entry["ms_min"] <= entry["ms"] <= entry["ms_max"]
            assert entry["ratio_min"] <= entry["ratio"] <= entry["ratio_max"]
        assert costs["plain"]["ratio"] == 1
        assert prediction["acceptance_from"] == "peagle-k4@eager"
        assert [row["k"] for row in prediction["by_k"]] == [1, 2, 3, 4]
        assert [row["k"] for row in prediction["by_k"] if row["measured_speedup"]] == [2, 4]
        assert prediction["oracle"][0]["k"] == 4


def test_markdown_names_every_method_and_its_numbers(result: dict[str, Any]) -> None:
    text = to_markdown(result)
    for section in result["sections"]:
        for method in section["methods"]:
            assert f"| {method['method']} | {method['tokens_per_second']:.1f} | {method['speedup']['median']:.2f} [" in text
    assert "break-even length" in text
    assert "t_verify(q) / t(1)" in text
    assert "python scripts/benchmark.py" in text


def test_plots_are_written(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hf_peagle.benchmark_plots import plot

    written = plot(result, tmp_path)
    assert sorted(p.name for p in written) == sorted(f"{kind}-fp32-b{b}.png" for b in (1, 2) for kind in ("costs", "speed", "time"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_without_matplotlib_no_plots_but_a_message(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sys

    from hf_peagle.benchmark_plots import plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot(result, tmp_path / "plots") == []
    assert "pip install matplotlib" in caplog.text


def test_ratios_follow_from_the_records(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial.jsonl"
    section = run_benchmark(_options(), _load, partial)["sections"][0]
    records = [json.loads(line) for line in partial.read_text().splitlines()][1:]
    rates: dict[tuple[str, int | None], float] = {}
    for name in {r["method"] for r in records}:
        mine = [r for r in records if r["kind"] == "generation" and r["method"] == name]
        assert sorted(r["group"] for r in mine) == [0, 1, 2, 3]
        for block in (None, 0, 1):
            chosen = [r for r in mine if block in (None, r["block"])]
            rates[name, block] = sum(len(r["tokens"][0]) for r in chosen) / sum(r["seconds"] for r in chosen)
    for method in section["methods"]:
        name = method["method"]
        per_block = [rates[name, block] / rates["plain@eager", block] for block in (0, 1)]
        assert method["tokens_per_second"] == pytest.approx(rates[name, None])
        assert method["speedup"]["overall"] == pytest.approx(rates[name, None] / rates["plain@eager", None])
        assert method["speedup"]["median"] == pytest.approx(statistics.median(per_block))
        assert [method["speedup"]["min"], method["speedup"]["max"]] == pytest.approx(sorted(per_block))


def test_the_order_rotates_and_oracles_come_last(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial.jsonl"
    run_benchmark(_options(), _load, partial)
    records = [json.loads(line) for line in partial.read_text().splitlines()][1:]
    generation = [r for r in records if r["kind"] == "generation"]
    orders = [[r["method"] for r in generation if r["group"] == g] for g in range(4)]
    assert len({order[0] for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) and order[-1].startswith("oracle") for order in orders)


# ---------------------------------------------------------------------- interruption


class _Stop(Exception):
    pass


def test_an_interrupted_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / "out.json.partial.jsonl"
    timed: list[str] = []
    limit = [10]

    def counting(method: Method, batch: Batch, max_new_tokens: int) -> dict[str, Any]:
        if max_new_tokens == 14:  # not a warm-up call
            if len(timed) == limit[0]:
                raise _Stop
            timed.append(f"{method.name} {batch.prompts[0].id}")
        return run_method(method, batch, max_new_tokens)

    monkeypatch.setattr(benchmark, "run_method", counting)
    options = _options(max_new_tokens=14)
    with pytest.raises(_Stop):
        run_benchmark(options, _load, partial)
    before = partial.read_text().splitlines()
    assert len(before) == 1 + 10
    with partial.open("a") as file:
        file.write('{"kind": "generation", "sect')  # stopped while writing
    limit[0] = 1000
    with pytest.raises(ValueError, match="--resume"):
        run_benchmark(options, _load, partial)
    with pytest.raises(ValueError, match="max_new_tokens: 14 then, 13 now"):
        run_benchmark(_options(max_new_tokens=13), _load, partial, resume=True)
    result = run_benchmark(options, _load, partial, resume=True)
    assert partial.read_text().splitlines()[:11] == before
    assert len(timed) == len(set(timed)) == 4 * len(result["sections"][0]["methods"])
    assert all(m["identical"] == "4/4" for m in result["sections"][0]["methods"])


def test_prompts_not_answered_by_all_methods_do_not_count() -> None:
    def record(method: str, group: int, seconds: float) -> dict[str, Any]:
        split = {"prefill": 0.1, "draft": 0.0, "verify": seconds - 0.2, "other": 0.1, "setup": 0.0}
        named = {"kind": "generation", "group": group, "block": group, "method": method, "seconds": seconds, "split": split}
        return {**named, "tokens": [[1, 2, 3]], "rounds": None, "target_forwards": 3, "draft_forwards": None, "memory_mb": 1}

    records = [record("plain@eager", 0, 4.0), record("lookup@eager", 0, 2.0), record("plain@eager", 1, 100.0)]
    section = summarise(records, runs=2)
    assert section["groups"] == 1
    assert [m["speedup"]["overall"] for m in section["methods"]] == [1.0, 2.0]


# ---------------------------------------------------------------------- divergences


class _Perturbed:
    """A target whose generate() changes the answer's token at `place`."""

    def __init__(self, target: Any, place: int) -> None:
        self._target, self._place = target, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def __call__(self, **kwargs: Any) -> Any:
        return self._target(**kwargs)

    def generate(self, **kwargs: Any) -> torch.Tensor:
        output = self._target.generate(**kwargs)
        column = kwargs["input_ids"].shape[1] + self._place
        output[:, column] = (output[:, column] + 1) % VOCAB
        return output


def test_a_method_that_leaves_plain_decoding_is_found_with_the_margin_there() -> None:
    target = tiny_target("llama")
    prompt = EncodedPrompt("p", (5, 9, 30, 41))
    plain = run_method(Method("plain", Variant("eager", target)), Batch([prompt]), 8)["tokens"][0]
    perturbed: Any = _Perturbed(target, 3)
    perturbed.register_forward_hook = target.register_forward_hook
    found = run_method(Method("plain", Variant("odd", perturbed)), Batch([prompt]), 8)["tokens"][0]
    with torch.no_grad():
        logits = target(torch.tensor([[*prompt.ids, *plain[:3]]])).logits[0, -1]
    highest = logits.topk(2).values
    divergence = first_divergence(target, prompt, plain, found)
    assert divergence is not None
    assert (divergence["prompt"], divergence["position"]) == ("p", 3)
    assert (divergence["expected"], divergence["found"]) == (plain[3], found[3])
    assert plain[3] == int(logits.argmax())
    assert divergence["margin"] == pytest.approx(float(highest[0] - highest[1]), rel=1e-4)
    assert first_divergence(target, prompt, plain, plain) is None
    shorter = first_divergence(target, prompt, plain, plain[:5])
    assert shorter is not None
    assert (shorter["position"], shorter["expected"], shorter["found"]) == (5, plain[5], None)


def test_answers_end_with_their_end_token() -> None:
    output = torch.tensor([[7, 7, 1, 2, 0, 0], [7, 7, 4, 5, 6, 2]])
    assert answers(output, 2, [2]) == [[1, 2], [4, 5, 6, 2]]
    assert answers(output, 2, []) == [[1, 2, 0, 0], [4, 5, 6, 2]]


# ---------------------------------------------------------------------- methods and costs


def test_the_oracle_follows_rows_of_different_lengths() -> None:
    target = tiny_target("llama")
    variant = Variant("eager", target)
    batch = Batch([EncodedPrompt("a", (5, 9, 30, 41, 8, 12)), EncodedPrompt("b", (17, 4))])
    plain = run_method(Method("plain", variant), batch, 13)
    oracle = OracleHead(random_head(target))
    oracle.know([[*p.ids, *row] for p, row in zip(batch.prompts, plain["tokens"], strict=True)], room=3)
    record = run_method(Method("oracle", variant, 3, oracle), batch, 13)
    assert record["tokens"] == plain["tokens"]
    assert record["rounds"] == [[3, 3]] * 6
    assert record["target_forwards"] == 1 + 3
    wrong = [[*p.ids, *((t + 1) % VOCAB for t in row)] for p, row in zip(batch.prompts, plain["tokens"], strict=True)]
    oracle.know(wrong, room=3)
    assert run_method(Method("oracle", variant, 3, oracle), batch, 13)["tokens"] == plain["tokens"]


def test_measuring_costs_leaves_the_caches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("mistral")
    head = random_head(target)
    widths: list[tuple[int, int]] = []
    original = type(head).draft

    def draft(self: Any, token_ids: Any, features: Any, counts: Any, k: int, cache: Any, **kwargs: Any) -> Any:
        widths.append((k, int(cache.lengths.max())))
        return original(self, token_ids, features, counts, k, cache, **kwargs)

    monkeypatch.setattr(type(head), "draft", draft)
    context = torch.randint(3, VOCAB, (2, 24))
    costs = measure_costs([Variant("eager", target, {"peagle": head})], context, (1, 4), (1, 3), sweeps=2)
    assert widths[0] == (1, 0)  # reading the context
    assert sorted(set(widths[1:])) == [(1, 24), (3, 24)]
    assert len(widths) == 1 + 2 * 3
    assert set(costs["eager"]) == {"context", "sweeps", "plain", "verify", "draft", "draft_sequential"}


def test_the_best_draft_length_follows_from_costs_and_acceptance() -> None:
    verify = {1: 100.0, 2: 110.0, 3: 120.0, 4: 130.0, 5: 140.0, 9: 180.0}
    draft = {k: 10.0 + k for k in range(1, 9)}
    found = {p.k: p for p in predict([0.6, 0.4, 0.2, 0.1, 0.0], verify, draft, plain=100.0, rest=5.0, plain_rest=2.0)}
    assert list(found) == [1, 2, 3, 4, 5]
    assert found[2].acceptance_length == pytest.approx(2.0)
    assert found[2].round_ms == pytest.approx(120 + 12 + 5)
    assert found[2].break_even == pytest.approx(137 / 102)
    assert found[2].speedup == pytest.approx(2.0 * 102 / 137)
    assert found[2].ceiling == pytest.approx(3 * 102 / 132)
    assert found[5].round_ms == pytest.approx(150 + 15 + 5)  # six rows lie between five and nine
    assert best_length({k: p.speedup for k, p in found.items()}) == 3
    wide = predict([0.9] * 8, {1: 100.0, 9: 100.0}, draft, plain=100.0)
    assert best_length({p.k: p.speedup for p in wide}) == 8
    hopeless = predict([0.05] * 8, verify, draft, plain=100.0)
    assert best_length({p.k: p.speedup for p in hopeless}) == 0
    assert best_length({}) == 0


def test_curves_are_continued_beyond_their_ends() -> None:
    curve = {2: 10.0, 4: 20.0, 8: 24.0}
    assert [interpolate(curve, q) for q in (2, 3, 6, 8, 10, 1)] == [10.0, 15.0, 22.0, 24.0, 26.0, 5.0]
    with pytest.raises(ValueError, match="cannot be derived"):
        interpolate({1: 1.0}, 2)


def test_the_fastest_variant_carries_the_other_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    optimised: list[Any] = []
    monkeypatch.setattr("hf_peagle.benchmark_methods.optimise", lambda model: optimised.append(model))
    section = run_benchmark(_options(optimise=True, limit=2, random_head=False), _load)["sections"][0]
    names = {m["method"] for m in section["methods"]}
    assert names == {
        *("plain@eager", "plain@optimised", "lookup@optimised", "peagle-adaptive@eager", "oracle-k4@optimised"),
        *(f"peagle-{n}@optimised" for n in ("k2", "k4", "adaptive")),
    }
    assert len(optimised) == 2  # copies of the target and of the head
    own, stock = "speedup", "speedup_stock"
    assert all(own in m and stock in m for m in section["methods"])


def test_no_optimisation_is_said_and_the_rest_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_peagle.benchmark_methods.optimise", lambda model: "not on this processor")
    section = run_benchmark(_options(optimise=True, limit=2), _load)["sections"][0]
    assert "No optimised variant: not on this processor." in section["notes"]
    assert {m["variant"] for m in section["methods"]} == {"eager"}


# ---------------------------------------------------------------------- prompts and options


def test_reads_both_prompt_formats_and_takes_the_turn_to_answer() -> None:
    turns = parse_record({"question_id": 7, "category": "x", "turns": ["first", "second"]}, "mt", "?")
    assert [m["content"] for m in conversation_to_answer(turns)] == ["first"]
    user, other = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    chat = parse_record({"messages": [{"role": "system", "content": "s"}, user, other, user]}, "c", "?")
    assert [m["role"] for m in conversation_to_answer(chat)] == ["system", "user", "assistant", "user"]
    answered = parse_record({"messages": [user, other, user, other]}, "c", "?")
    assert [m["role"] for m in conversation_to_answer(answered)] == ["user", "assistant", "user"]


@pytest.fixture
def two_files(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "one" / "question.jsonl", tmp_path / "two.jsonl"]
    files[0].parent.mkdir()
    files[0].write_text("".join(json.dumps({"question_id": i, "turns": [f"task {i}"]}) + "\n" for i in range(8)))
    lines = [json.dumps({"messages": [{"role": "user", "content": "x" * (i + 1)}]}) + "\n" for i in range(4)]
    files[1].write_text("".join(lines))
    return files


def test_prompts_are_spread_over_files_always_the_same_way(two_files: list[Path]) -> None:
    chosen = select_prompts(two_files, _encode, limit=5)
    assert [p.id for p in chosen] == ["one/1", "two/line2", "one/4", "two/line4", "one/6"]
    assert select_prompts(two_files, _encode, limit=5) == chosen
    assert len(select_prompts(two_files, _encode)) == 12
    short = select_prompts(two_files[1:], _encode, max_prompt_tokens=2)
    assert [p.id for p in short] == ["two/line1", "two/line2"]
    with pytest.raises(ValueError, match="max_prompt_tokens=1"):
        select_prompts(two_files[:1], _encode, max_prompt_tokens=1)
    with pytest.raises(ValueError, match="limit=0"):
        select_prompts(two_files, _encode, limit=0)


def test_options_that_make_no_sense_name_the_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, message in (
        ({"num_assistant_tokens": (0,)}, "num_assistant_tokens=0"),
        ({"num_assistant_tokens": (20,)}, "num_assistant_tokens=20"),
        ({"runs": 0}, "runs=0"),
        ({"dtype": ("int8",)}, "dtype='int8'"),
        ({"batch_size": (1, 0)}, "batch_size=0"),
    ):
        with pytest.raises(ValueError, match=message):
            _options(**changes)
    with pytest.raises(SystemExit):
        parse_arguments(["--resume"])
    assert "--json" in capsys.readouterr().err


def test_quick_gives_way_to_what_is_asked_for() -> None:
    options, _ = parse_arguments(["--quick", "--limit", "6"])
    assert (options.limit, options.max_new_tokens, options.num_assistant_tokens) == (6, 64, (2, 4, "adaptive"))
    options, output = parse_arguments(["--json", "out.json", "--num-assistant-tokens", "3", "adaptive"])
    assert (options.limit, options.runs, options.num_assistant_tokens) == (None, 5, (3, "adaptive"))
    assert output.json == Path("out.json")


def test_command_line_writes_json_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out, tables = tmp_path / "r" / "out.json", tmp_path / "r" / "out.md"
    arguments = ["--quick", "--max-new-tokens", "6", "--no-optimise", "--cost-sweeps", "0", "--device", "cpu"]
    arguments += ["--json", str(out), "--markdown", str(tables), "--target", str(tmp_path / "some" / "target")]
    assert benchmark.main(arguments, _load) == 0
    result = json.loads(out.read_text())
    assert "--json r/out.json" in result["command"]
    assert str(tmp_path) not in out.read_text() + tables.read_text()
    assert tables.read_text().startswith("# Benchmark")
    assert not list(out.parent.glob("*.partial.jsonl"))


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = Records(path, {"settings": {"runs": 5}}, resume=False)
    records.add({"kind": "costs", "section": "fp32/b1", "group": None, "method": None, "costs": {}})
    again = Records(path, {"settings": {"runs": 5}}, resume=True)
    assert again.of("fp32/b1") == records.of("fp32/b1")
    with pytest.raises(ValueError, match="runs: 5 then, 4 now"):
        Records(path, {"settings": {"runs": 4}}, resume=True)


def test_command_line_shows_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = command_line(["--target", str(tmp_path / "a b"), "--limit", "3"])
    assert shown == "python scripts/benchmark.py --target 'a b' --limit 3"

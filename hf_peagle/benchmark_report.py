"""From the records of a benchmark to its summary (JSON-able), and from the summary to Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .benchmark_costs import as_rows, best_length, milliseconds, predict
from .stats import SpeculationStats

STOCK = "plain@eager"


def summarise(records: Sequence[Mapping[str, Any]], runs: int) -> dict[str, Any]:
    """
    One section (a data type and batch size) from its records: "generation" records of every method and group of
    prompts, "comparison" records beside them, and one "costs" record if costs were measured.

    A method is compared with plain decoding of its own variant (`speedup`) and with the stock target's
    (`speedup_stock`): `overall` is the ratio of tokens per second over all prompts; `median`, `min` and `max` are over
    the blocks of prompts ("runs"), in each of which every method answered the same prompts.
    """
    generation = [r for r in records if r["kind"] == "generation"]
    compared = {(r["method"], r["group"]): r for r in records if r["kind"] == "comparison"}
    costs = next((r["costs"] for r in records if r["kind"] == "costs"), None)
    names = list(dict.fromkeys(r["method"] for r in generation))
    groups = sorted({r["group"] for r in generation})
    by_method = {name: {r["group"]: r for r in generation if r["method"] == name} for name in names}
    # An interrupted group counts for nobody: all methods are judged on the same prompts.
    complete = [g for g in groups if all(g in by_method[name] for name in names)]
    methods = []
    for name in names:
        own_plain = f"plain@{name.rpartition('@')[2]}"
        mine = [by_method[name][g] for g in complete]
        row = _method_row(name, mine, [compared[name, g] for g in complete if (name, g) in compared])
        for key, base in (("speedup", own_plain), ("speedup_stock", STOCK)):
            if base in by_method:
                row[key] = _ratio(mine, [by_method[base][g] for g in complete], runs)
                if row["decode_tokens_per_second"] and key == "speedup":
                    reference = _decode_rate([by_method[base][g] for g in complete])
                    row["decode_speedup"] = row["decode_tokens_per_second"] / reference if reference else None
        methods.append(row)
    section = {"methods": methods, "groups": len(complete), "costs": costs, "predictions": {}}  # type: ignore
    if costs:
        section["predictions"] = {v: _prediction(v, costs[v], methods) for v in costs}
    return section


def _method_row(name: str, records: list[Mapping[str, Any]], compared: list[Mapping[str, Any]]) -> dict[str, Any]:
    kind_and_length, _, variant = name.rpartition("@")
    tokens = sum(_tokens(r) for r in records)
    seconds = sum(r["seconds"] for r in records)
    rows = len(records[0]["tokens"]) if records else 1
    forwards = [r["target_forwards"] for r in records if r["target_forwards"] is not None]
    row: dict[str, Any] = {
        "method": name,
        "variant": variant,
        "kind": kind_and_length.split("-")[0],
        "length": _length(kind_and_length),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "decode_tokens_per_second": _decode_rate(records),
        "target_forwards_per_token": rows * sum(forwards) / tokens if forwards and tokens else None,
        "memory_mb": max((r["memory_mb"] for r in records), default=0.0),
        "acceptance_length": None,
        "acceptance_by_depth": None,
        "split": _split(records),
    }
    pairs = [tuple(pair) for r in records for pair in r["rounds"] or []]
    if any(r["rounds"] is not None for r in records):
        stats = SpeculationStats(rounds=pairs)
        row["acceptance_length"] = stats.acceptance_length
        row["acceptance_by_depth"] = stats.acceptance_by_depth
        row["drafted_per_round"] = stats.drafted / len(pairs) if pairs else 0.0
    elif forwards and rows == 1 and sum(forwards) > len(forwards):
        row["acceptance_length"] = (tokens - len(forwards)) / (sum(forwards) - len(forwards))
    total = sum(r["rows"] for r in compared)
    row["identical"] = f"{sum(r['identical'] for r in compared)}/{total}"
    row["identical_to_stock"] = f"{sum(r['identical_to_stock'] for r in compared)}/{total}"
    row["divergences"] = [d for r in compared for d in r["divergences"]]
    return row


def _length(kind_and_length: str) -> int | str | None:
    _, _, length = kind_and_length.partition("-")
    return int(length[1:]) if length.startswith("k") else length or None


def _tokens(record: Mapping[str, Any]) -> int:
    return sum(len(row) for row in record["tokens"])


def _decode_rate(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Tokens per second once the prompt is read: the first token and the prompt's pass are left out."""
    tokens, seconds = 0, 0.0
    for record in records:
        if record["split"] is None:
            return None
        tokens += _tokens(record) - len(record["tokens"])
        seconds += record["seconds"] - record["split"]["prefill"]
    return tokens / seconds if seconds > 0 else None


def _ratio(mine: list[Mapping[str, Any]], base: list[Mapping[str, Any]], runs: int) -> dict[str, float]:
    def rate(records: list[Mapping[str, Any]]) -> float:
        return sum(_tokens(r) for r in records) / sum(r["seconds"] for r in records)

    if not mine:
        return {}
    blocks = []
    for block in range(runs):
        ours, theirs = ([r for r in side if r["block"] == block] for side in (mine, base))
        if ours:
            blocks.append(rate(ours) / rate(theirs))
    return {
        "overall": rate(mine) / rate(base),
        "median": statistics.median(blocks),
        "min": min(blocks),
        "max": max(blocks),
        "runs": len(blocks),
    }


def _split(records: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Where the time went: seconds in all, milliseconds per pass, and shares of the rounds (the prompt's pass aside)."""
    known = [r for r in records if r["split"] is not None]
    if not known or len(known) < len(records):
        return None
    total = {name: sum(r["split"][name] for r in known) for name in ("prefill", "draft", "verify", "other", "setup")}
    in_rounds = total["draft"] + total["verify"] + total["other"]
    rounds = sum(r["target_forwards"] - 1 for r in known)
    drafts = sum(r["draft_forwards"] or 0 for r in known)
    return {
        "seconds": total,
        "share_of_round": {n: total[n] / in_rounds if in_rounds else 0.0 for n in ("draft", "verify", "other")},
        "draft_ms": 1000 * total["draft"] / drafts if drafts else None,
        "verify_ms": 1000 * total["verify"] / rounds if rounds else None,
        "other_ms": 1000 * total["other"] / rounds if rounds else None,
    }


def _prediction(variant: str, costs: Mapping[str, Any], methods: list[dict[str, Any]]) -> dict[str, Any]:
    """What the cost curves and the acceptance say about every K, and what was measured."""
    drafted = [m for m in methods if m["variant"] == variant and m["kind"] == "peagle" and m["acceptance_by_depth"]]
    fixed = {m["length"]: m for m in drafted if isinstance(m["length"], int)}
    source = fixed[max(fixed)] if fixed else drafted[0] if drafted else None
    if source is None or "draft" not in costs:
        return {}
    plain = next((m for m in methods if m["kind"] == "plain" and m["variant"] == variant), None)
    rest = (source["split"] or {}).get("other_ms") or 0.0
    plain_rest = ((plain or {}).get("split") or {}).get("other_ms") or 0.0
    predictions = predict(
        source["acceptance_by_depth"],
        milliseconds(costs["verify"]),
        milliseconds(costs["draft"]),
        costs["plain"]["ms"],
        rest,
        plain_rest,
    )
    rows = as_rows(predictions)
    measured = {}
    for row in rows:
        method = fixed.get(row["k"])
        row["measured_speedup"] = method["speedup"]["median"] if method and method.get("speedup") else None
        row["measured_decode_speedup"] = method.get("decode_speedup") if method else None
        if row["measured_speedup"] is not None:
            measured[row["k"]] = row["measured_speedup"]
    oracles = []
    for method in methods:
        ceiling = next((r["ceiling"] for r in rows if r["k"] == method["length"]), None)
        if method["kind"] == "oracle" and method["variant"] == variant and ceiling and method.get("decode_speedup"):
            share = method["decode_speedup"] / ceiling
            oracles.append({"k": method["length"], "ceiling": ceiling, "reached": method["decode_speedup"], "share": share})
    return {
        "acceptance_from": source["method"],
        "rest_ms": rest,
        "plain_rest_ms": plain_rest,
        "by_k": rows,
        "predicted_best_k": best_length({p.k: p.speedup for p in predictions}),
        "measured_best_k": best_length(measured) if measured else None,
        "oracle": oracles,
    }


def readme_rows(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per P-EAGLE method of a section; `k` is a number or "adaptive"; speed-ups as in [`summarise`]."""
    rows = []
    for method in section["methods"]:
        speedup = method.get("speedup")
        if method["kind"] != "peagle" or not speedup:
            continue
        split = method["split"] or {}
        stock = method.get("speedup_stock") or {}
        row = {
            "k": method["length"],
            "variant": method["variant"],
            "acceptance_length": method["acceptance_length"],
            **{f"speedup_{name}": speedup[name] for name in ("median", "min", "max")},
            **{f"speedup_stock_{name}": stock.get(name) for name in ("median", "min", "max")},
            "tokens_per_second": method["tokens_per_second"],
            "draft_ms": split.get("draft_ms"),
            "verify_ms": split.get("verify_ms"),
            "identical": method["identical"],
        }
        rows.append(row)
    return rows


# ---------------------------------------------------------------------- Markdown


def to_markdown(result: Mapping[str, Any]) -> str:
    """The whole result as Markdown tables."""
    machine, settings = result["machine"], result["settings"]
    lines = ["# Benchmark", "", f"Command: `{result['command']}`", ""]
    lines += _table(["machine", ""], [[key, str(value)] for key, value in machine.items()])
    lines.append(
        f"Target {result['target']}, drafter {result['drafter']}; {result['prompts']['count']} prompts, at most "
        f"{settings['max_new_tokens']} new tokens, greedy. Ratios: median [lowest, highest] over {settings['runs']} runs "
        "(blocks of prompts that every method answered in turn); in brackets behind it the ratio over everything. "
        '"Own plain" is plain generate() of the same target in the same state, "stock plain" that of the untouched target.'
    )
    for section in result["sections"]:
        lines += ["", f"## {section['dtype']}, batch {section['batch_size']}", ""]
        lines += _methods_table(section)
        lines += _depth_table(section)
        for variant, prediction in section["predictions"].items():
            lines += _prediction_table(variant, prediction)
        if section["costs"]:
            lines += _costs_table(section["costs"])
        lines += _divergence_table(section)
        lines += [f"- {note}" for note in section["notes"]]
    return "\n".join(lines) + "\n"


def _methods_table(section: Mapping[str, Any]) -> list[str]:
    head = ["method", "tok/s", "× own plain", "× stock plain", "acceptance length", "target passes/token"]
    head += ["draft / verify / rest of a round", "draft ms", "verify ms", "identical", "peak MB"]
    body = []
    for m in section["methods"]:
        split = m["split"] or {}
        shares = split.get("share_of_round")
        body.append(
            [
                m["method"],
                f"{m['tokens_per_second']:.1f}",
                _ratio_text(m.get("speedup")),
                _ratio_text(m.get("speedup_stock")),
                _number(m["acceptance_length"]),
                _number(m["target_forwards_per_token"]),
                " / ".join(f"{100 * shares[n]:.0f} %" for n in ("draft", "verify", "other")) if shares else "",
                _number(split.get("draft_ms"), 1),
                _number(split.get("verify_ms"), 1),
                m["identical"],
                f"{m['memory_mb']:.0f}",
            ]
        )
    return _table(head, body)


def _depth_table(section: Mapping[str, Any]) -> list[str]:
    methods = [m for m in section["methods"] if m["acceptance_by_depth"] and m["kind"] != "oracle"]
    deepest = max((len(m["acceptance_by_depth"]) for m in methods), default=0)
    if not deepest:
        return []
    body = [[m["method"], *(f"{100 * share:.0f} %" for share in m["acceptance_by_depth"])] for m in methods]
    body = [row + [""] * (deepest + 1 - len(row)) for row in body]
    return _table(["accepted at depth", *map(str, range(1, deepest + 1))], body)


def _prediction_table(variant: str, prediction: Mapping[str, Any]) -> list[str]:
    if not prediction:
        return []
    head = ["K", "acceptance length", "round ms", "break-even length", "predicted ×", "measured ×", "measured × (decode)"]
    body = []
    for row in prediction["by_k"]:
        texts = [str(row["k"]), f"{row['acceptance_length']:.2f}", f"{row['round_ms']:.1f}", f"{row['break_even']:.2f}"]
        texts += [f"{row['speedup']:.2f}", _number(row["measured_speedup"]), _number(row["measured_decode_speedup"])]
        body.append([*texts, f"{row['ceiling']:.2f}"])
    lines = [f"### What to expect by K ({variant}, acceptance of {prediction['acceptance_from']})", ""]
    lines += _table([*head, "ceiling ×"], body)
    lines.append(f"Best K: predicted {prediction['predicted_best_k']}, measured {prediction['measured_best_k']}.")
    for oracle in prediction["oracle"]:
        lines.append(
            f"Accept-all oracle at K={oracle['k']}: {oracle['reached']:.2f}× of the {oracle['ceiling']:.2f}× that the "
            f"cost curves allow ({100 * oracle['share']:.0f} %)."
        )
    return [*lines, ""]


def _costs_table(costs: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for variant, curves in costs.items():
        base = curves["plain"]
        lines += [
            f"### Cost of passes ({variant}, context {curves['context']}, t(1) = {base['ms']:.1f} ms [{base['ms_min']:.1f}, {base['ms_max']:.1f}])",
            "",
        ]
        titles = (("verify", "t_verify(q) / t(1)"), ("draft", "t_draft(K) / t(1), one pass"))
        for curve, title in (*titles, ("draft_sequential", "same head, K passes")):
            if entries := curves.get(curve):
                values = [f"{e['ratio']:.2f} [{e['ratio_min']:.2f}, {e['ratio_max']:.2f}]" for e in entries.values()]
                lines += _table([title, *entries], [["", *values]])
    return lines


def _divergence_table(section: Mapping[str, Any]) -> list[str]:
    body = [
        [m["method"], d["prompt"], str(d["position"]), f"{d['margin']:.3g}", str(d["expected"]), str(d["found"])]
        for m in section["methods"]
        for d in m["divergences"]
    ]
    if not body:
        return []
    head = ["method", "prompt", "first difference at token", "top-2 margin", "plain", "method's"]
    return ["### First differences from plain decoding of the same target", "", *_table(head, body)]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body), ""]


def _ratio_text(ratio: Mapping[str, float] | None) -> str:
    if not ratio:
        return ""
    return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}] ({ratio['overall']:.2f})"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"

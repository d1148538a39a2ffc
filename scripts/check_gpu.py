#!/usr/bin/env python
"""
One command for a machine with a CUDA device: are captured graphs right there, do they sync, leak, and pay?

    python scripts/check_gpu.py --json results/gpu.json

Uses a random target and head of real shapes (no download): tokens with graphs equal those without in fp32 and, up to near
ties, in bf16; a replayed draft step does not synchronise; memory is flat over many calls; times of a round and speed
against plain and compiled plain decoding. Random heads are never accepted, so an oracle drafts the known answer.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_peagle import PEagleConfig, PEagleDrafterModel, collect_statistics
from hf_peagle.cuda_graphs import CudaBackend, DraftGraphs, reset_graphs, use_cuda_graphs

logger = logging.getLogger("check_gpu")
K = 4


def make_pair(dtype: torch.dtype, layers: int, hidden: int) -> tuple[PreTrainedModel, PEagleDrafterModel]:
    """A random Llama of the given size and a random head for it, on the GPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().eval()
    head_config = PEagleConfig.from_target(config, num_hidden_layers=2, draft_vocab_size=8192, share_embeddings=True, draft_schedule="constant")
    return target, PEagleDrafterModel(head_config).to("cuda", dtype).eval()


def generate(target: PreTrainedModel, prompt: torch.Tensor, tokens: int, **kwargs: Any) -> torch.Tensor:
    """Greedy decoding of `tokens` new tokens."""
    mask = torch.ones_like(prompt)
    return target.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **kwargs)


def check_tokens(dtype: torch.dtype, layers: int, hidden: int) -> dict[str, Any]:
    """Graph on and off, dynamic and static cache, batch 1 and 3."""
    target, head = make_pair(dtype, layers, hidden)
    report: dict[str, Any] = {}
    for batch in (1, 3):
        prompt = torch.randint(3, 30000, (batch, 48), device="cuda")
        for cache in (None, "static"):
            kwargs = {} if cache is None else {"cache_implementation": cache}
            off = generate(target, prompt, 64, assistant_model=head, num_assistant_tokens=K, **kwargs)
            with use_cuda_graphs(), collect_statistics() as calls:
                on = generate(target, prompt, 64, assistant_model=head, num_assistant_tokens=K, **kwargs)
            plain = generate(target, prompt, 64, **kwargs)
            report[f"batch {batch}, {cache or 'dynamic'} cache"] = {
                "graphs on equals off": torch.equal(on, off),
                "equals plain": torch.equal(on, plain),
                "first difference to plain": _first_difference(on, plain),
                "draft graph": calls[0].draft_graph,
                "verify graph": calls[0].verify_graph,
            }
    reset_graphs()
    return report


def _first_difference(a: torch.Tensor, b: torch.Tensor) -> int | None:
    different = (a != b).any(dim=0).nonzero()
    return int(different[0]) if different.numel() else None


def check_no_sync(layers: int, hidden: int) -> str:
    """A replayed draft step under `set_sync_debug_mode("error")`."""
    target, head = make_pair(torch.bfloat16, layers, hidden)
    graphs = DraftGraphs(head, target, 1, 512, CudaBackend())
    inputs = {
        "token_ids": torch.randint(3, 30000, (1, K + 1), device="cuda"),
        "features": torch.randn(1, K + 1, head.config.feature_size, device="cuda", dtype=torch.bfloat16),
        "counts": torch.tensor([3], device="cuda"),
    }
    if graphs.draft(**inputs, k=K) is None:
        return f"not captured: {graphs.failed}"
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs.draft(**inputs, k=K)
    except RuntimeError as error:
        return f"synchronises: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no synchronisation"


def check_memory(calls: int, layers: int, hidden: int) -> dict[str, float]:
    """Allocated memory after the tenth and after the last of many short calls, in MiB."""
    target, head = make_pair(torch.bfloat16, layers, hidden)
    prompt = torch.randint(3, 30000, (1, 48), device="cuda")
    after: list[float] = []
    for _ in range(calls):
        with use_cuda_graphs():
            generate(target, prompt, 12, assistant_model=head, num_assistant_tokens=K)
        after.append(torch.cuda.memory_allocated() / 2**20)
    reset_graphs()
    return {"after 10 calls": after[9], f"after {calls} calls": after[-1], "peak": max(after)}


class _Oracle(PEagleDrafterModel):
    """Runs the head, then drafts the known answer, so that a round commits K + 1 tokens."""

    truth: torch.Tensor
    start: int

    def draft(self, token_ids: Any, features: Any, counts: Any, num_tokens: int, cache: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().draft(token_ids, features, counts, num_tokens, cache, *args, **kwargs)
        # Slots in the cache count the prompt's tokens and all generated ones but the last.
        place = (cache.lengths + 1)[:, None] + torch.arange(num_tokens, device=self.device)
        out.tokens = self.truth.gather(1, place.clamp(max=self.truth.shape[1] - 1))
        return out


def measure_speed(runs: int, tokens: int, layers: int, hidden: int) -> dict[str, Any]:
    """Seconds per call of every way of decoding, interleaved; medians with lowest and highest."""
    target, head = make_pair(torch.bfloat16, layers, hidden)
    prompt = torch.randint(3, 30000, (1, 48), device="cuda")
    oracle = _Oracle(head.config).to("cuda", torch.bfloat16).eval()
    oracle.load_state_dict(head.state_dict())
    oracle.truth = generate(target, prompt, tokens)
    assisted = {"assistant_model": oracle, "num_assistant_tokens": K}

    def with_graphs(**kwargs: Any) -> None:
        with use_cuda_graphs():
            generate(target, prompt, tokens, **assisted, **kwargs)

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: generate(target, prompt, tokens),
        "plain, static cache, compiled": lambda: generate(target, prompt, tokens, cache_implementation="static"),
        "oracle, eager": lambda: generate(target, prompt, tokens, **assisted),
        "oracle, draft graph": with_graphs,
        "oracle, static cache, both graphs": lambda: with_graphs(cache_implementation="static"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if run:  # the first round compiles and captures
                seconds[name].append(time.perf_counter() - begin)
    plain = seconds["plain"]
    return {
        name: {
            "ms per token": 1000 * statistics.median(times) / tokens,
            "speed-up over plain": [round(f([p / t for p, t in zip(plain, times, strict=True)]), 3) for f in (statistics.median, min, max)],
        }
        for name, times in seconds.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, help="write the results here")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=200, help="calls of the memory check")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs of the speed check")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        logger.error("No CUDA device here: this check has nothing to run on.")
        return 2
    shape = (options.layers, options.hidden)
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
    }
    steps: dict[str, Callable[[], Any]] = {
        "tokens fp32": lambda: check_tokens(torch.float32, 4, 512),
        "tokens bf16": lambda: check_tokens(torch.bfloat16, 4, 512),
        "sync": lambda: check_no_sync(*shape),
        "memory MiB": lambda: check_memory(options.calls, 4, 512),
        "speed": lambda: measure_speed(options.runs, options.tokens, *shape),
    }
    for name, step in steps.items():
        begin = time.perf_counter()
        results[name] = step()
        logger.info("%s (%.0f s): %s", name, time.perf_counter() - begin, json.dumps(results[name], indent=2))
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    exact = all(entry["graphs on equals off"] and entry["equals plain"] for entry in results["tokens fp32"].values())
    flat = results["memory MiB"][f"after {options.calls} calls"] <= results["memory MiB"]["after 10 calls"] + 1
    ok = exact and flat and results["sync"] == "no synchronisation"
    logger.info("RESULT: %s", "passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

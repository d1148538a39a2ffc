"""
Converts a P-EAGLE head between formats, and checks a folder for vLLM.

    python scripts/convert.py HEAD OUT --to vllm --target TARGET       # for `vllm serve`; prints the line to use
    python scripts/convert.py HEAD OUT --to speculators --target TARGET
    python scripts/convert.py HEAD OUT --to peagle --target TARGET     # from any format that docs/formats.md lists
    python scripts/convert.py --check vllm FOLDER                      # exit code 1 if vLLM could not serve it

HEAD and TARGET are folders or Hub repositories.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_peagle import PEagleDrafterModel
from hf_peagle.formats import FormatError, check_vllm, is_foreign, speculators, vllm, writing


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    try:
        if args.check:
            return report(args.source)
        convert(args)
    except (FormatError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return report(args.destination) if args.to == "vllm" and args.parallel else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub repository of the head")
    parser.add_argument("destination", nargs="?", help="new folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=("vllm", "speculators", "peagle"), help="format to write")
    what.add_argument("--check", choices=("vllm",), help="check SOURCE, and write nothing")
    parser.add_argument("--target", help="folder or Hub repository of the target model")
    parser.add_argument("--mask-token-id", type=int, help="id of the mask token, where the head does not know it")
    parser.add_argument("--target-layer-ids", type=int, nargs="+", help="captured streams, by the layer they enter")
    parser.add_argument("--allow-bin", action="store_true", help="read pytorch_model.bin (torch.load, weights_only)")
    parser.add_argument("--max-shard-size", default="5GB")
    args = parser.parse_args(argv)
    if args.to and not args.destination:
        parser.error("--to needs a destination folder")
    return args


def convert(args: argparse.Namespace) -> None:
    head = load_head(args)
    args.parallel = head.config.algorithm == "peagle"
    if args.to == "peagle":
        print(f"written: {writing.write_own(head, args.destination, args.max_shard_size)}")
        return
    target, tokenizer = load_target(head, args)
    writer = vllm if args.to == "vllm" else speculators
    folder = writer.write(head, args.destination, target, tokenizer, args.mask_token_id, args.max_shard_size)
    name = args.target or head.config.target_name_or_path or "TARGET"
    print(f"written: {folder}")
    if not args.parallel or check_vllm.check(folder).passed:
        print(f"serve it with:\n{vllm.serve_command(folder, name, head.config.draft_length, args.parallel)}")


def load_head(args: argparse.Namespace) -> PEagleDrafterModel:
    options: dict[str, Any] = {}
    if is_foreign(args.source):
        options = {"target_config": args.target, "allow_bin": args.allow_bin, "target_layer_ids": args.target_layer_ids}
        options["mask_token_id"] = args.mask_token_id
        args.mask_token_id = None  # said once is enough: the head knows it now
    return PEagleDrafterModel.from_pretrained(args.source, **options)


def load_target(head: PEagleDrafterModel, args: argparse.Namespace) -> tuple[Any, Any]:
    """The target and its tokenizer, if the head borrows tables that the other format stores."""
    if not args.target or not (head.config.share_embeddings or head.config.share_lm_head):
        return None, None
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype="auto")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError) as error:
        logging.warning("No tokenizer at %s (%s); the mask token's id is not checked against it.", args.target, error)
        tokenizer = None
    return target, tokenizer


def report(folder: str) -> int:
    result = check_vllm.check(folder)
    for warning in result.warnings:
        print(f"warning: {warning}")
    for error in result.errors:
        print(f"error: {error}")
    print(f"{folder}: {'vLLM can serve it' if result.passed else f'{len(result.errors)} errors'}")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())

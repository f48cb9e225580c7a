"""Tokens a second of a target whose decoder layers lie on disk: specinfer's `auto`, and transformers on the same hooks.

    python benchmarks/offload.py --target DIR --draft DIR --prompts prompts/code.jsonl --count 6 --max-new-tokens 32
        [--folder DIR] [--dtype float32] [--draft-quantize int4] [--out FILE]

Every pass fetches every layer (transformers' ``device_map``, accelerate's hooks); all else of the target, and the
draft, is in memory.  All methods run the same model object and take turns, prompt by prompt, after a prompt to warm up;
prefill counts.  Whether layers come from the disk itself or from the system's cache of files is up to the machine.
The table has the median of tokens a second, the median ratio of auto to this method with its 95 % interval and
the worst prompt's, how many prompts have the same ids, and tokens per target pass; below, the sizes of auto's trees.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from common import read_prompts
from peers import interval
from transformers import AutoConfig, AutoModelForCausalLM

from specinfer import ModelDraft, SpeculativeDecoder
from specinfer.loading import load

WARM_UP = "Say hello."


def on_disk(target: str) -> dict[str, str]:
    """Return a device map with all decoder layers on disk, and the rest in memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target))
    layers = next(name for name, module in model.named_modules() if module is model.get_decoder().layers)
    parts = [name for name, module in model.named_modules() if name and not [*module.children()]]
    rest = {name: "cpu" for name in parts if not name.startswith(f"{layers}.")}
    return rest | {f"{layers}.{index}": "disk" for index in range(len(model.get_decoder().layers))}


def methods(args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return what answers a prompt's ids, by name, and the tokenizer."""
    loaded = load(args.target, args.dtype, device_map=on_disk(args.target), offload_folder=args.folder)
    draft = load(args.draft, args.dtype)
    model, end = loaded.model, args.max_new_tokens
    ours = load(args.draft, args.dtype, quantize=args.draft_quantize) if args.draft_quantize else draft
    drafts = [ModelDraft(ours.model, ours.tokenizer, ours.name)]
    decoder = SpeculativeDecoder(model, loaded.tokenizer, drafts, "auto")

    def auto(ids: list[int]) -> tuple[list[int], int | None, list[int]]:
        result = decoder.generate(ids, max_new_tokens=end, temperature=0)
        print(result.stats.seconds, *result.stats.notes, file=sys.stderr)
        return result.token_ids, result.stats.target_passes, [step.tree.num_drafted for step in result.steps]

    def theirs(ids: list[int], **options: Any) -> tuple[list[int], int | None, list[int]]:
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        output = model.generate(given, attention_mask=mask, max_new_tokens=end, do_sample=False, **options)
        return output[0, len(ids) :].tolist(), None, []

    assistant = {"assistant_model": draft.model}
    if draft.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        assistant |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": draft.tokenizer}
    made = {"auto": auto, "generate": theirs, "assisted": lambda ids: theirs(ids, **assistant)}
    return made, loaded.tokenizer


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all methods answer all prompts in turn; return a line for each answer."""
    answers, tokenizer = methods(args)
    lines: list[dict[str, Any]] = []
    for turn, text in enumerate([WARM_UP, *read_prompts(args.prompts, args.count)]):
        chat = [{"role": "user", "content": text}]
        has_template = bool(tokenizer.chat_template)
        template = {"add_generation_prompt": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(chat, **template) if has_template else tokenizer(text)["input_ids"]
        for name, answer in answers.items():
            started = perf_counter()
            tokens, passes, trees = answer(ids)
            seconds = perf_counter() - started
            line = {"method": name, "prompt": text, "ids": tokens, "seconds": seconds, "passes": passes, "trees": trees}
            lines += [line] if turn else []
            print(f"{turn} {name}: {len(tokens)} tokens, {seconds:.1f} s, {trees}", file=sys.stderr, flush=True)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Return the figures as text."""
    by_method: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_method.setdefault(line["method"], []).append(line)
    rates = {name: [len(line["ids"]) / line["seconds"] for line in found] for name, found in by_method.items()}
    rows = [f"{'':12}{'tokens/s':>9}   auto / it, median, worst prompt    same ids  tokens per pass"]
    for name, found in by_method.items():
        ratios = [ours / other for ours, other in zip(rates["auto"], rates[name], strict=True)]
        low, high = interval(ratios)
        same = sum(line["ids"] == ours["ids"] for line, ours in zip(found, by_method["auto"], strict=True))
        passes = [line["passes"] for line in found if line["passes"]]
        each = f"{sum(len(line['ids']) for line in found) / sum(passes):.2f}" if passes else "-"
        figures = f"{median(ratios):.2f} [{low:.2f}, {high:.2f}], {min(ratios):.2f}"
        rows.append(f"{name:12}{median(rates[name]):9.2f}   {figures:32} {f'{same}/{len(found)}':<9} {each}")
    sizes = Counter(size for line in by_method["auto"] for size in line["trees"])
    return "\n".join([*rows, f"nodes of auto's trees: {', '.join(f'{n} x {sizes[n]}' for n in sorted(sizes))}"])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-quantize", help="weights of fewer bits for auto's draft; the others read all bits")
    parser.add_argument("--folder", help="for layers that cannot be read from the checkpoint's files")
    parser.add_argument("--out", type=Path, help="JSON lines, one a measurement")
    args = parser.parse_args()
    lines = measure(args)
    if args.out:
        args.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(table(lines))


if __name__ == "__main__":
    main()

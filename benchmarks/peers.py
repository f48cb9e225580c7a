"""Tokens a second of other ways to decode the same prompts: transformers, llama.cpp, another version of specinfer.

    python benchmarks/peers.py --prompts prompts/code.jsonl prompts/chat.jsonl --count 16 --max-new-tokens 64
        [--target DIR] [--draft NAME ...] [--dtype float32] [--temperature 1] [--methods plain auto generate ...]
        [--assistant DIR] [--quantize int8 int4] [--activations int8] [--other PYTHON]
        [--llama FOLDER GGUF [GGUF ...]] [--llama-draft GGUF] [--json]

``--quantize`` adds `auto` and `plain` of the target rounded to fewer bits, with the same drafts; ``--activations``
adds those of a quantised file's target whose products round states to 8 bits.
``--other`` is the interpreter of an environment with another version of specinfer, ``--llama`` the folder of
llama.cpp's programs, followed by GGUF files of the target's weights.  Its server (`llama-server`) decodes them, a
process for each of ``--llama-methods``: `llama` is plain, `llama-ngram` looks tokens up in the text, and `llama-draft`
drafts with the model of ``--llama-draft``, as many tokens a step as the server's default.
``--rows`` lets our methods decode this many prompts together, each with those that follow it.
All take turns, prompt by prompt, forwards and backwards; prompts are fed as token ids, and prefill counts.  The table
has the median of tokens a second, the median ratio of the first method to this one with its 95 % bootstrap interval,
the worst prompt's ratio, and for our methods new tokens per target pass, prefill excluded, over all prompts.
"""

import argparse
import atexit
import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from common import Worker, all_or_none, free_port, print_rows, read_prompts, serve

LLAMA = {"llama": [], "llama-ngram": ["--spec-type", "ngram-simple"], "llama-draft": ["--spec-type", "draft-simple"]}


def ours(args: argparse.Namespace) -> None:
    """Answer with the version of specinfer that this interpreter has, and with transformers."""
    import torch

    from specinfer import SpeculativeDecoder
    from specinfer.loading import load

    more = dict([args.form.split("=")]) if args.form else {}  # other versions may not know it
    drafts = [*args.draft] or ["auto"]
    auto = all_or_none(SpeculativeDecoder.from_pretrained(args.target, drafts, dtype=args.dtype, **more))
    model, tokenizer = auto.target.model, auto.tokenizer  # one copy of the weights serves all
    made = {"auto": auto, "plain": SpeculativeDecoder(model, tokenizer, [], None)}
    assisted: dict[str, Any] = {}
    if args.assistant:
        assistant = load(args.assistant, args.dtype)
        assisted["assistant_model"] = assistant.model
        if assistant.tokenizer.get_vocab() != tokenizer.get_vocab():  # universal assisted generation
            assisted |= {"tokenizer": tokenizer, "assistant_tokenizer": assistant.tokenizer}
    extra = {"generate": {}, "assisted": assisted, "lookup": {"prompt_lookup_num_tokens": 10}}

    def answer(method: str = "", prompt: str | list[int] = "", seed: int = 0) -> Any:
        if not method:
            chat = [{"role": "user", "content": prompt}]
            return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        started = perf_counter()
        if method in made:
            options = {"temperature": args.temperature, "max_new_tokens": args.max_new_tokens}
            found = made[method].generate(prompt, seed=seed, top_k=0, **options)
            seconds, results = perf_counter() - started, found if isinstance(found, list) else [found]
            ids = [token for result in results for token in result.token_ids]
            return len(ids), seconds, ids, sum(result.stats.target_passes for result in results)
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
        ids = torch.tensor([prompt])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.max_new_tokens,
            **(sampling or {"do_sample": False}),
            **extra[method],
        )[0, len(prompt) :]
        return len(output), perf_counter() - started, output.tolist(), None

    serve(answer)


class Llama:
    """llama.cpp's server, which answers one question at a time, as a `Worker` does.

    Args:
        path: of a GGUF file.
        method: of `LLAMA`.
        args: of the command line.
    """

    def __init__(self, path: str, method: str, args: argparse.Namespace) -> None:
        self.url, self.args = f"http://127.0.0.1:{free_port()}", args
        words = [f"{args.llama[0]}/llama-server", "--model", path, *LLAMA[method], "--port", self.url.split(":")[2]]
        words += ["--threads", str(args.threads), "--parallel", "1", "--ctx-size", "4096"]
        words += ["--spec-draft-model", args.llama_draft] if method == "llama-draft" else []
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        while not self._ready():
            if self.process.poll() is not None:
                raise SystemExit(f"llama.cpp's server ended: {shlex.join(words)}")
            sleep(0.2)

    def _ready(self) -> bool:
        """Return whether it has read its model."""
        try:
            return bool(urlopen(f"{self.url}/health").status == 200)
        except URLError:
            return False

    def ask(self, method: str, prompt: list[int], seed: int) -> Any:
        """Return what a `Worker` returns."""
        options = {"temperature": self.args.temperature, "samplers": ["temperature"], "seed": seed}
        options |= {"n_predict": self.args.max_new_tokens, "cache_prompt": False, "return_tokens": True}
        body = json.dumps({"prompt": prompt, **options}).encode()
        started = perf_counter()
        answer = json.load(urlopen(Request(f"{self.url}/completion", body, {"Content-Type": "application/json"})))
        return len(answer["tokens"]), perf_counter() - started, answer["tokens"], None


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    import numpy as np

    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


def main() -> None:
    """Measure all in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1, help="prompts that are decoded together, for auto and plain")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--target")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--methods", nargs="+", default=["auto", "plain", "generate", "lookup"])
    parser.add_argument("--assistant")
    parser.add_argument("--quantize", nargs="+", default=[])
    parser.add_argument("--activations", nargs="+", default=[])
    parser.add_argument("--form", help="quantize=int4, activations=int8: of a worker's models")
    parser.add_argument("--other")
    parser.add_argument("--other-methods", nargs="+", default=["auto", "plain"])
    parser.add_argument("--llama", nargs="+", default=[])
    parser.add_argument("--llama-methods", nargs="+", default=["llama"], choices=LLAMA)
    parser.add_argument("--llama-draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON lines, one a measurement")
    parser.add_argument("--json", action="store_true", help="print a JSON object a row in place of the table")
    parser.add_argument("--worker")
    args = parser.parse_args()
    if "llama-draft" in args.llama_methods and not args.llama_draft:
        parser.error("llama-draft needs --llama-draft GGUF, the draft")
    ours(args) if args.worker else compare(args)


def compare(args: argparse.Namespace) -> None:
    """Start workers, ask them in turn, print the table."""
    passed = ["--dtype", args.dtype, "--temperature", str(args.temperature)]
    passed += ["--max-new-tokens", str(args.max_new_tokens)]
    passed += [part for name in args.draft for part in ("--draft", name)]
    for name in ("target", "assistant"):
        passed += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    worker = Worker(sys.executable, __file__, "ours", *passed, "--methods", *args.methods)
    asked: dict[str, tuple[Worker | Llama, str]] = {method: (worker, method) for method in args.methods}
    forms = {form: f"quantize={form}" for form in args.quantize}
    forms |= {f"{form} activations": f"activations={form}" for form in args.activations}
    for name, form in forms.items():
        rounded = Worker(sys.executable, __file__, "ours", *passed, "--form", form)
        asked |= {f"{name} {method}": (rounded, method) for method in ("auto", "plain")}
    if args.other:
        other = Worker(args.other, __file__, "ours", *passed, "--methods", *args.other_methods)
        asked |= {f"other {method}": (other, method) for method in args.other_methods}
    for path, method in product(args.llama[1:], args.llama_methods):
        asked[f"{method} {Path(path).stem[-12:]}"] = Llama(path, method, args), method
    rates: dict[str, list[float]] = {method: [] for method in asked}
    texts: dict[str, list[Any]] = {method: [] for method in asked}
    passes: dict[str, list[int | None]] = {method: [] for method in asked}
    prompts = ["Say hello."] * 2 + read_prompts(args.prompts, args.count)
    for turn, text in enumerate(prompts):
        prompt = worker.ask(prompt=text)
        if args.rows > 1:
            prompt = [worker.ask(prompt=prompts[(turn + row) % len(prompts)]) for row in range(args.rows)]
        for name, (who, method) in [*asked.items()][:: 1 if turn % 2 else -1]:  # who comes after another process
            count, seconds, ids, taken = who.ask(method=method, prompt=prompt, seed=turn)
            if turn < 2:  # warming up
                continue
            rates[name].append(count / seconds)
            texts[name].append(ids)
            passes[name].append(taken)
            if args.out:
                with args.out.open("a") as file:
                    line = {"method": name, "prompt": text, "tokens": count, "seconds": seconds, "passes": taken}
                    print(json.dumps(line), file=file)
        print(f"{turn + 1}", file=sys.stderr, flush=True)
    found = summaries(rates, texts, passes)
    print_rows(found) if args.json else print_table(found)


def summaries(
    rates: dict[str, list[float]], texts: dict[str, list[Any]], passes: dict[str, list[int | None]]
) -> list[dict[str, Any]]:
    """Return the figures of each method; ratios are the first one's to it."""
    first, found = next(iter(rates)), []
    for name in rates:
        ratios = [a / b for a, b in zip(rates[first], rates[name], strict=True)]
        low, high = interval(ratios)
        row: dict[str, Any] = {"method": name, "tokens/s": median(rates[name])}
        if name != first:
            same = sum(a == b for a, b in zip(texts[first], texts[name], strict=True))
            row |= {"ratio": median(ratios), "low": low, "high": high, "worst": min(ratios)}
            row |= {"same ids": same, "prompts": len(ratios)}
        if counted := [taken for taken in passes[name] if taken is not None]:
            row["tokens/pass"] = sum(map(len, texts[name])) / sum(counted)
        found.append(row)
    return found


def print_table(found: list[dict[str, Any]]) -> None:
    """Print the figures of all methods."""
    print(f"{'':24} tokens/s  tokens/pass   {found[0]['method']} / it, median, worst prompt      same ids")
    for row in found:
        each = f"{row['tokens/pass']:.2f}" if "tokens/pass" in row else "-"
        ratio = "{ratio:.2f} [{low:.2f}, {high:.2f}], {worst:.2f}".format(**row) if "ratio" in row else ""
        same = f"{row['same ids']} of {row['prompts']}" if "ratio" in row else ""
        print(f"{row['method']:24}{row['tokens/s']:9.1f}  {each:>11}   {ratio:36} {same}")


if __name__ == "__main__":
    main()

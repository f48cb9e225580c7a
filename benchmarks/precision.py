"""How far logits in 16 bits are from those in float32: of the plain model, and of its compiled passes.

    specinfer compile [--target DIR]
    python benchmarks/precision.py --prompts prompts/code.jsonl prompts/chat.jsonl [--count 16] [--target DIR]
        [--dtype bfloat16]

The reference is a copy of the model in float32.  The error of a token's logits is their root mean square difference
from the reference, over the spread of the reference.  "other tokens" counts where another token is the best one.
"""

from copy import deepcopy
from typing import Any

import torch
from common import load_target, parser, read_prompts
from torch import Tensor

from specinfer.attention import TreeModel, lay_out_chains, running
from specinfer.attention.passes.registry import equip

LONGEST = 200  # tokens of a prompt


def logits(model: TreeModel, ids: list[int]) -> Tensor:
    """Return the logits after each token, (T, V)."""
    session = model.session(1, len(ids))
    return session.append(lay_out_chains([ids], model.device)).row(0).double()


def main() -> None:
    """Measure and print a line for each way to run passes."""
    p = parser(__doc__)
    p.add_argument("--dtype", default="bfloat16")
    args = p.parse_args()
    network, tokenizer = load_target(args.target, args.dtype)
    plain, compiled = TreeModel(network), TreeModel(network)
    equip(compiled, (), "auto")
    if compiled.ways.fast is None:
        raise SystemExit(f"passes run plain: {compiled.ways.missing}")
    reference = TreeModel(deepcopy(network).float())
    prompts: list[Any] = [tokenizer(text)["input_ids"][:LONGEST] for text in read_prompts(args.prompts, args.count)]
    errors: dict[str, list[Tensor]] = {"plain": [], str(compiled.ways.fast): []}
    others = dict.fromkeys(errors, 0)
    with running(reference, plain, compiled):
        for ids in prompts:
            wanted = logits(reference, ids)
            spread = (wanted - wanted.mean(-1, keepdim=True)).square().mean(-1)
            for name, model in zip(errors, (plain, compiled), strict=True):
                found = logits(model, ids)
                errors[name].append(((found - wanted).square().mean(-1) / spread).sqrt())
                others[name] += int((found.argmax(-1) != wanted.argmax(-1)).sum())
    print(f"{'':14} median    90 %  largest  other tokens")
    for name, parts in errors.items():
        all_errors = torch.cat(parts)
        figures = (float(all_errors.quantile(share)) for share in (0.5, 0.9, 1.0))
        print(f"{name:14}", *(f"{figure:.4f} " for figure in figures), f"{others[name]} of {len(all_errors)}")


if __name__ == "__main__":
    main()

"""What rounding the states of packed products costs: logits of a quantised file beside those of its numbers in float32.

    python benchmarks/rounding.py --prompts prompts/code.jsonl prompts/chat.jsonl [--count 4] --target FILE
        [--activations int8]

Products round states to integers of 16 or 8 bits; the reference multiplies the file's own numbers by states in float32.
"KL" is the divergence from the reference in nats a token, "error" the root mean square difference of logits over
their spread.
"""

import torch
from common import load_target, parser, read_prompts
from torch import Tensor

from specinfer.attention.packed import products

LONGEST = 100  # tokens of a prompt


def main() -> None:
    """Measure and print a line."""
    options = parser(__doc__)
    options.add_argument("--activations")
    args = options.parse_args()
    model, tokenizer = load_target(args.target, "float32", args.activations)
    compiled = products.library()
    if compiled is None:
        raise SystemExit("there is no C++ compiler, so products do not round")
    texts = [tokenizer.encode(prompt)[:LONGEST] for prompt in read_prompts(args.prompts, args.count)]

    def logits(library: object) -> Tensor:
        products.library = lambda: library  # type: ignore[assignment]
        with torch.inference_mode():
            return torch.cat([model(torch.tensor([ids])).logits[0].double() for ids in texts])

    rounded, wanted = logits(compiled), logits(None)
    expected = wanted.log_softmax(-1)
    divergence = (expected.exp() * (expected - rounded.log_softmax(-1))).sum(-1)
    error = (rounded - wanted).square().mean().sqrt() / wanted.std()
    others = int((rounded.argmax(-1) != wanted.argmax(-1)).sum())
    print(f"{len(wanted)} tokens: KL {divergence.mean():.1e}, error {error:.1e}, another best token {others} times")


if __name__ == "__main__":
    main()

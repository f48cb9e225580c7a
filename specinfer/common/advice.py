"""Guesses of the word that was meant by one that is not known.

Knows: how words are misspelt, and what other libraries call the same things.  Does not know: who takes which words.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

NEAR = 0.7  # how much alike a misspelt word and the right one are, at least

# by the word here, those that other libraries have for the same thing
ELSEWHERE: dict[str, str] = {
    "max_new_tokens": "max_tokens max_completion_tokens n_predict",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop stop_sequences stop_words until",
    "eos_token_id": "stop_token_ids",
    "num_return_sequences": "n best_of num_sequences",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "top_logprobs return_logprobs",
    "max_time": "timeout",
    "seed": "generator random_state",
    "target": "model model_id model_name pretrained_model_name_or_path",
    "drafts": "draft draft_model assistant assistant_model speculative_model speculative_config",
    "tree": "policy tree_policy",
    "dtype": "precision",
    "quantize": "load_in_8bit load_in_4bit quantization",
    "activations": "activation_dtype act_dtype states",
    "attn_implementation": "use_flash_attention_2",
    "tensor_parallel": "tp_size tp_plan tensor_parallel_size",
    "token": "use_auth_token",
    "compile": "torch_compile",
    "ngram": "n-gram prompt_lookup",
    "bundled": "eagle head heads",
    "BestFirst": "best-first",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "cuda": "gpu",
}
MEANT = {other: word for word, others in ELSEWHERE.items() for other in others.split()}


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that other libraries call so, or that is misspelt so; None if there is none."""
    known = {choice.lower(): choice for choice in choices}
    near = [MEANT.get(word.lower(), "").lower(), *get_close_matches(word.lower(), known, 1, NEAR)]
    return next((known[name] for name in near if name in known), None)


def did_you_mean(word: object, choices: Iterable[str], otherwise: str) -> str:
    """Return a question after the nearest choice, or other advice if none is near."""
    near = nearest(word, choices) if isinstance(word, str) else None
    return f"did you mean {near}?" if near else otherwise


def where_to_give(name: str, here: Iterable[str], elsewhere: Mapping[str, Iterable[str]], otherwise: str) -> str:
    """Return what to do with an option that a call does not take.

    Args:
        name: of the option.
        here: names of the options that the call takes.
        elsewhere: by call, the names of the options that other calls take.
        otherwise: the advice if the name is like none of these.
    """
    calls = {option: call for call, options in elsewhere.items() for option in options}
    if name in calls:
        return f"give it to {calls[name]}"
    taken = sorted(here)
    near = nearest(name, [*taken, *sorted(calls)])
    if near is None:
        return otherwise
    return f"did you mean {near}?" if near in taken else f"did you mean {near}, of {calls[near]}?"

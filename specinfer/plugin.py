"""`model.generate(..., custom_generate=specinfer.custom_generate)`: the engine inside transformers' own call.

Knows: what transformers hands to a custom decoding loop.  Does not know: how decoding works.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, PrefixConstrainedLogitsProcessor

from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.errors import InputError
from specinfer.prompts import check_ids
from specinfer.results import Result
from specinfer.row import Row
from specinfer.run import Run
from specinfer.sampling import Law, Stopping, resolve
from specinfer.tree import Policy

# What transformers prepares for every causal model, and the engine makes by itself.
_KNOWN_INPUTS = {
    "attention_mask",
    "cache_position",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "token_type_ids",
    "use_cache",
}


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with one `Result` per row; returned where ``return_dict_in_generate=True``."""

    results: list[Result] | None = None


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    draft_model: Any = "ngram",
    tree: Policy | str | None = "auto",
    seed: int | Sequence[int] | None = None,
    spec_streamer: Any = None,
    **model_inputs: Any,
) -> Any:
    """Decode with token trees inside ``model.generate(**inputs, custom_generate=specinfer.custom_generate, ...)``.

    ``draft_model``, ``tree``, ``seed`` and ``spec_streamer`` are given to ``generate`` as keyword arguments;
    transformers passes them on.  It does not pass on ``streamer``, ``assistant_model`` or ``tokenizer``: use
    ``spec_streamer``, ``draft_model``, and ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.

    Args:
        model: the target.
        input_ids: (B, T) long, left-padded where ``attention_mask`` is 0.
        logits_processor: built by transformers, warpers included; each is asked about one row at a time.
        stopping_criteria: asked after every single token.
        generation_config: complete.
        draft_model: a draft model, "ngram", a `Draft`, or a list of those.
        tree: the growth policy; None = no speculation.  Give all calls one `Auto` for it to keep what it learns.
        seed: as `SpeculativeDecoder.open`.
        spec_streamer: a transformers streamer, for one row.
        **model_inputs: what transformers prepared for the model; ``attention_mask`` (B, T) says what is padding.

    Returns:
        Tensor (B, T + new), right-padded with the pad token, or `SpeculativeOutput`.

    Raises:
        SpecinferError: what the decoder raises.
    """
    _check_inputs(model_inputs)
    drafts = draft_model if isinstance(draft_model, list | tuple) else [draft_model]
    decoder = SpeculativeDecoder(model, None, drafts, tree)
    settings = resolve(model.generation_config, generation_config, stopping_criteria=stopping_criteria)
    budget = settings.budget(input_ids.shape[1])
    mask = model_inputs.get("attention_mask")  # named as a parameter, transformers would pass it twice
    prompts = _without_padding(input_ids, mask)
    check_ids([prompt for _, prompt in prompts], decoder.target.vocab_size)
    decoder.check_lengths([prompt for _, prompt in prompts], [budget] * len(prompts))
    rows = [
        Row(
            index=index,
            prompt=prompt,
            law=Law([_of_row(processor, index) for processor in logits_processor], padding),
            stopping=Stopping(settings, budget, input_ids.device),
            seed=own_seed,
            sampling=settings.do_sample,
            draft_names=[draft.name for draft in decoder.drafts],
        )
        for index, ((padding, prompt), own_seed) in enumerate(zip(prompts, row_seeds(seed, len(prompts)), strict=True))
    ]
    run = Run(decoder, rows, single=len(rows) == 1)
    run.finish(spec_streamer)
    return _output(run.results(), input_ids, generation_config)


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[tuple[list[int], list[int]]]:
    """Split each row into its left padding and its prompt."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = []
    for index, (ids, kept) in enumerate(zip(input_ids, mask, strict=True)):
        padding, prompt = ids[kept == 0].tolist(), ids[kept != 0].tolist()
        if not prompt or not bool(kept[len(padding) :].all()):
            raise InputError(f"row {index} is empty or not padded on the left: pad prompts on the left")
        rows.append((padding, prompt))
    return rows


def _of_row(processor: Any, index: int) -> Any:
    """Return the processor as one row of the batch, alone, needs it.

    transformers' repetition penalty knows every row's padding, and a prefix constraint asks for the row's number.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored[index])
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(index, ids), num_beams=1)
    return processor


def _check_inputs(model_inputs: dict[str, Any]) -> None:
    """Raise `InputError` for an input that decoding with trees would drop without a word."""
    for name, value in model_inputs.items():
        filled = name == "past_key_values" and value is not None and value.get_seq_length() > 0
        if filled or (name not in _KNOWN_INPUTS and value is not None):
            raise InputError(f"{name} cannot be used with custom_generate: trees are decoded from token ids alone")


def _output(results: list[Result], input_ids: Tensor, generation_config: Any) -> Any:
    pad = generation_config.pad_token_id
    longest = max(len(result.token_ids) for result in results)
    new = [[*r.token_ids, *[0 if pad is None else pad] * (longest - len(r.token_ids))] for r in results]
    sequences: Any = torch.cat([input_ids, torch.tensor(new, device=input_ids.device)], 1)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, results=results)
    return sequences

"""`model.generate(..., custom_generate=specinfer.custom_generate)`: the engine inside transformers' own call.

Knows: what transformers gives to a custom decoding loop.  Does not know: how decoding works.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, LogitsProcessor, StoppingCriteria

from specinfer.calls.run import Run
from specinfer.common.values import checked_logprobs, plain
from specinfer.decoder import SpeculativeDecoder, row_seeds
from specinfer.engine.callables import as_functions
from specinfer.engine.requests import make_requests
from specinfer.engine.sampling import GenerationSettings, resolve
from specinfer.errors import InputError
from specinfer.prompts import Padded, check_beside, check_ids, without_padding
from specinfer.results import Result
from specinfer.tree import Policy

Given = TypeVar("Given")

# Inputs that transformers prepares for every causal model, and the engine does not need.
_PREPARED = ("cache_position", "logits_to_keep", "use_cache")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output with one `Result` per row; returned if ``return_dict_in_generate=True``."""

    results: list[Result] | None = None


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Sequence[LogitsProcessor],
    stopping_criteria: Sequence[StoppingCriteria],
    generation_config: GenerationConfig,
    draft_model: object = None,
    tree: Policy | str | None = "auto",
    seed: int | Sequence[int] | None = None,
    spec_streamer: BaseStreamer | None = None,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    logprobs: bool | int = False,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    **model_inputs: object,
) -> Tensor | SpeculativeOutput:
    """Decode with token trees inside ``model.generate(**inputs, custom_generate=specinfer.custom_generate, ...)``.

    Give ``draft_model``, ``tree``, ``seed``, ``spec_streamer``, ``target_tokenizer`` and ``logprobs`` to ``generate``
    as keyword arguments; transformers passes them on.  It does not pass on ``streamer`` and ``assistant_model``, so
    they are read from its call.  Nor does it pass on ``tokenizer``: for stop strings use
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.

    Args:
        model: the target.
        input_ids: (B, T) long, left-padded where ``attention_mask`` is 0.
        logits_processor, stopping_criteria: built by transformers, warpers included.  Those of the caller's are made
            each row's own, as `SpeculativeDecoder.prepare` says; criteria are called after every single token.
        generation_config: complete.
        draft_model: a draft model, "ngram", a `Draft`, or a list of those; None is "ngram".
        tree: the growth policy; None = no speculation.  Give all calls the same `Auto`, and it keeps what it learns.
        seed, logprobs: as `SpeculativeDecoder.prepare`; log-probabilities are in `SpeculativeOutput`.
        spec_streamer: a transformers streamer, for one row, that also gets the prompt.
        target_tokenizer: needed if the draft has another one: ``draft_model=ModelDraft(model, its tokenizer)``.
        assistant_model: the draft model by transformers' name.
        streamer: a transformers streamer, for one row, that has the prompt already.
        **model_inputs: as transformers prepared them; ``attention_mask`` (B, T) is 0 at padding.

    Returns:
        Tensor (B, T + new), right-padded with the pad token, or `SpeculativeOutput`.

    Raises:
        SpecinferError: the decoder refuses the call; two drafts or streamers; token types or positions that matter.
    """
    kept = _kept_back(input_ids)
    assistant_model, streamer = kept.get("assistant_model", assistant_model), kept.get("streamer", streamer)
    draft = _only(draft_model=draft_model, assistant_model=assistant_model)
    reader = _only(spec_streamer=spec_streamer, streamer=streamer)
    decoder = SpeculativeDecoder(model, target_tokenizer, "ngram" if draft is None else draft, tree)
    given = model.generation_config, generation_config, None, stopping_criteria
    settings = resolve(*given, decoder.target.vocab_size, complete=True)
    settings = replace(settings, processors=as_functions("logits_processor", [*logits_processor]))
    padded = _read(input_ids, model_inputs, settings, decoder)
    sequences = settings.sequences  # as often has transformers repeated each prompt
    seeds = row_seeds(seed, len(padded) // sequences, decoder.target.ranks, sequences)
    prompts, paddings = [row.ids for row in padded], [row.left for row in padded]
    kept_logprobs, settings_of = checked_logprobs(logprobs), [settings] * len(padded)
    run = Run(make_requests(decoder, prompts, settings_of, seeds, paddings=paddings, logprobs=kept_logprobs))
    run.finish(reader, has_prompt=streamer is not None)
    return _output(run.results(), input_ids, generation_config)


def _read(
    input_ids: Tensor, model_inputs: dict[str, object], settings: GenerationSettings, decoder: SpeculativeDecoder
) -> list[Padded]:
    """Return the prompts without their padding; raise `InputError` for one that cannot be continued."""
    mask = model_inputs.pop("attention_mask", None)  # if it were a parameter, transformers would pass it twice
    padded = without_padding(input_ids.tolist(), mask)
    for index, row in enumerate(padded):
        if row.right:
            raise InputError(f"row {index} is padded on the right, where its text will stand: pad prompts on the left")
    prompts = [row.ids for row in padded]
    check_ids(prompts, decoder.target.vocab_size)
    decoder.check_lengths(prompts, [settings.budget(input_ids.shape[1])] * len(prompts))
    _check_inputs(model_inputs, padded, decoder)
    return padded


def _only(**given: Given | None) -> Given | None:
    """Return the one that was given of arguments that mean the same, or None."""
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} mean the same: give one of them")
    return next(iter(named.values()), None)


def _kept_back(input_ids: Tensor) -> dict[str, Any]:
    """Return the local variables of the `generate` call that these ids come from.

    transformers 5.23 does not pass ``streamer`` and ``assistant_model`` to a custom loop.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is code and frame.f_locals.get("input_ids") is input_ids:
            return frame.f_locals
    return {}


def _check_inputs(model_inputs: dict[str, object], rows: Sequence[Padded], decoder: SpeculativeDecoder) -> None:
    """Raise `InputError` for an input that decoding with trees would silently ignore."""
    beside = {name: value for name, value in model_inputs.items() if name not in _PREPARED}
    cache = beside.get(decoder.target.cache_name)
    if isinstance(cache, Cache) and _is_empty(cache):
        beside.pop(decoder.target.cache_name)
    positions = plain(beside.pop("position_ids", None))
    planes = positions if isinstance(positions, list) and isinstance(positions[0][0], list) else [positions]
    for plane in planes:  # one for each direction of an image; for text they are equal
        check_beside({**beside, "position_ids": plane}, rows, decoder.target)


def _is_empty(cache: Cache) -> bool:
    """Whether a cache has read nothing.  Recurrent layers count no tokens, so a cache of them alone cannot say."""
    only_states = bool(cache.layers) and all(cache.is_linear)
    return not (cache.has_previous_state() if only_states else cache.get_seq_length())


def _output(results: list[Result], input_ids: Tensor, config: GenerationConfig) -> Tensor | SpeculativeOutput:
    new = [torch.tensor(result.token_ids, device=input_ids.device) for result in results]
    padded = pad_sequence(new, batch_first=True, padding_value=config.pad_token_id or 0)
    sequences: Any = torch.cat([input_ids, padded], 1)
    if config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, results=results)
    return sequences

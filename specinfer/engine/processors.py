"""From logits to the distribution that tokens are drawn from, with the semantics of Hugging Face, per node.

Knows: logits processors, one row's ids.  Does not know: options and their checks (`sampling`), models, verification.

There is one path.  `Processors.scores` turns logits into processed scores.  Greedy decoding takes their argmax, and
sampling adds noise first.  Processors that read ``input_ids`` (repetition penalty, no-repeat n-gram, anything custom)
see each node's own path.
"""

from collections.abc import Hashable, Sequence
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from specinfer.engine.callables import Function, RowFunction
from specinfer.engine.constraint import Constraint
from specinfer.engine.excluded import MinLength, MinNewTokens, SuppressTokens
from specinfer.engine.sampling import GenerationSettings
from specinfer.errors import SamplingError

T = TypeVar("T")


class Processors:
    """The target's distribution at a node, for one row: logits in, processed scores out.

    Args:
        processors: Hugging Face logits processors, or functions of the row, in the order they apply.
        padding: ids that processors see before the row's ids (the left padding of a `transformers` batch).
    """

    def __init__(self, processors: Sequence[Function | RowFunction | Constraint], padding: Sequence[int] = ()) -> None:
        self.padding = list(padding)
        self.chain = [each if isinstance(each, RowFunction | Constraint) else RowFunction(each) for each in processors]
        self.constraint = next((each for each in self.chain if isinstance(each, Constraint)), None)
        self.reads_path = any(each.reads_path for each in self.chain)
        self.in_order = not all(each.stateless for each in self.chain)  # nodes go as the text does, each once

    @property
    def settings(self) -> Hashable:
        """What the processors are, if numbers say it all: then they do the same to all logits; else None."""
        found: list[tuple[type, tuple[tuple[str, object], ...]]] = []
        for each in self.chain:
            if not isinstance(each, RowFunction) or not each.stateless:
                return None
            found.append((type(each.function), tuple(vars(each.function).items())))
        is_plain = all(isinstance(value, int | float | None) for _, pairs in found for _, value in pairs)
        return tuple(found) if is_plain else None

    @classmethod
    def of(cls, settings: GenerationSettings, prompt_length: int, device: torch.device) -> "Processors":
        """Build the processors of a row whose prompt has ``prompt_length`` tokens, in Hugging Face's order.

        A grammar's follows the caller's: what warpers draw from is what it allows.
        """
        built = _processors(settings, prompt_length, device)
        matchers = [settings.grammar.copy()] if settings.grammar else []
        rules = [Constraint(matcher, prompt_length, settings.eos) for matcher in matchers]
        warpers = _warpers(settings.config) if settings.do_sample else []
        return cls([*with_custom(built, settings.processors), *rules, *warpers])

    def without_prefix_readers(self) -> "Processors":
        """Return the distribution without the processors that read a prefix: drafts rank their candidates by it."""
        return Processors([each for each in self.chain if not each.reads_path])

    def scores(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Process logits (N, V) of N nodes whose ids so far are ``paths``; return float32 (or wider) scores (N, V).

        ``paths`` may be empty if `reads_path` is False.  Without processors, the logits themselves may be returned.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=bool(self.chain))
        for processor in self.chain:
            scores = processor.after(paths, scores, self.padding)
        return scores


def with_custom(built: Sequence[T], custom: Sequence[Function | RowFunction]) -> list[T | RowFunction]:
    """Return what was built, with the caller's functions in place of those of their type, then the caller's others."""
    functions = [each if isinstance(each, RowFunction) else RowFunction(each) for each in custom]
    merged = [next((each for each in functions if isinstance(made, type(each.function))), made) for made in built]
    return merged + [each for each in functions if not any(each is taken for taken in merged)]


def _processors(settings: GenerationSettings, prompt_length: int, device: torch.device) -> list[Function]:
    """Build what applies to greedy decoding and sampling, in the order of transformers' `_get_logits_processor`."""
    c, n, eos = settings.config, prompt_length, sorted(settings.eos)
    bos, last, penalty = c.forced_bos_token_id, c.forced_eos_token_id, c.repetition_penalty
    decay = eos and c.exponential_decay_length_penalty
    end, begin = n + settings.budget(n), n + (n == 1 and bos is not None)
    least, least_new, suppressed, first = c.min_length, c.min_new_tokens, c.suppress_tokens, c.begin_suppress_tokens
    return _built(
        sequence_bias=c.sequence_bias is not None and (hf.SequenceBiasLogitsProcessor, c.sequence_bias),
        repetition_penalty=penalty not in (None, 1) and (hf.RepetitionPenaltyLogitsProcessor, float(penalty)),
        no_repeat_ngram_size=c.no_repeat_ngram_size and (hf.NoRepeatNGramLogitsProcessor, c.no_repeat_ngram_size),
        bad_words_ids=c.bad_words_ids is not None and (hf.NoBadWordsLogitsProcessor, c.bad_words_ids, eos or None),
        min_length=least and eos and not least_new and (MinLength, least, eos, device),
        min_new_tokens=least_new and eos and (MinNewTokens, n, least_new, eos, device),
        forced_bos_token_id=bos is not None and (hf.ForcedBOSTokenLogitsProcessor, bos),
        forced_eos_token_id=last is not None and (hf.ForcedEOSTokenLogitsProcessor, end, last, device),
        remove_invalid_values=c.remove_invalid_values and (hf.InfNanRemoveLogitsProcessor,),
        exponential_decay_length_penalty=decay and (hf.ExponentialDecayLengthPenalty, decay, eos, n),
        suppress_tokens=suppressed is not None and (SuppressTokens, suppressed, device),
        begin_suppress_tokens=first is not None and (hf.SuppressTokensAtBeginLogitsProcessor, first, begin, device),
    )


def _warpers(c: GenerationConfig) -> list[Function]:
    """Build what applies to sampling only, in transformers' order.

    They hold numbers on the CPU, which work on every device: drafts on other devices than the target's also use them.
    """
    return _built(
        temperature=c.temperature != 1 and (hf.TemperatureLogitsWarper, float(c.temperature)),
        top_h=c.top_h is not None and (hf.TopHLogitsWarper, c.top_h),
        top_k=c.top_k and (hf.TopKLogitsWarper, c.top_k),
        top_p=c.top_p < 1 and (hf.TopPLogitsWarper, float(c.top_p)),
        min_p=c.min_p and (hf.MinPLogitsWarper, c.min_p),
        typical_p=0 < (c.typical_p or 0) < 1 and (hf.TypicalLogitsWarper, c.typical_p),
        epsilon_cutoff=0 < (c.epsilon_cutoff or 0) < 1 and (hf.EpsilonLogitsWarper, c.epsilon_cutoff),
        eta_cutoff=0 < (c.eta_cutoff or 0) < 1 and (hf.EtaLogitsWarper, c.eta_cutoff, -inf, 1),
        renormalize_logits=c.renormalize_logits and (hf.LogitNormalization,),
    )


def _built(**wanted: Any) -> list[Function]:
    """Construct processors from (class, *arguments) by option; an option with a false value needs none.

    Raises:
        SamplingError: a processor refuses its value; names the option.
    """
    built = []
    for option, line in wanted.items():
        try:
            built += [line[0](*line[1:])] if line else []
        except (ValueError, TypeError) as error:
            raise SamplingError(f"{option} has an impossible value: {error}") from error
    return built

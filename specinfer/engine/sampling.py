"""From logits to the distribution that tokens are drawn from, and when a text ends: Hugging Face semantics, per node.

Knows: `GenerationConfig`, logits processors, stopping criteria, one row's ids.
Does not know: models, caches, drafting, verification.

There is one path: `Processors.scores` turns logits into processed scores; greedy takes their argmax, sampling adds
noise. Processors that read ``input_ids`` (repetition penalty, no-repeat n-gram, anything custom) see each node's own
path.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan
from typing import Any

import torch
from torch import Tensor

from specinfer.attention import on_device
from specinfer.common.values import plain
from specinfer.errors import InputError, SamplingError

DEFAULT_MAX_NEW_TOKENS = 128

# Options that cannot work when several tokens of several branches are scored in one pass, or that belong to another
# decoding method: their neutral values, and why anything else is refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several hypotheses; tree verification follows one"),
    "num_beam_groups": ((None, 1), "beam search keeps several hypotheses; tree verification follows one"),
    "diversity_penalty": ((None, 0, 0.0), "it belongs to group beam search"),
    "constraints": ((None,), "constrained beam search keeps several hypotheses"),
    "force_words_ids": ((None,), "constrained beam search keeps several hypotheses"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search re-ranks by hidden states of the whole prefix"),
    "dola_layers": ((None,), "DoLa contrasts layers, which a tree pass does not return"),
    "guidance_scale": ((None, 1, 1.0), "guidance needs a second, unconditional pass per node"),
    "watermarking_config": ((None,), "watermarks keep a state per emitted token"),
    "token_healing": ((None, False), "it rewrites the prompt"),
    "num_return_sequences": ((None, 1), "repeat the prompt in a batch with one seed each instead"),
    "encoder_repetition_penalty": ((None, 1, 1.0), "it belongs to encoder-decoder models"),
    "encoder_no_repeat_ngram_size": ((None, 0), "it belongs to encoder-decoder models"),
    "decoder_start_token_id": ((None,), "it belongs to encoder-decoder models"),
    "prompt_lookup_num_tokens": ((None,), 'use drafts=["ngram"] instead'),
    "assistant_early_exit": ((None,), "use a draft model instead"),
    "assistant_ensemble_weight": ((None, 0, 0.0), "it is lossy by design"),
    "use_mtp": ((None, False), "use a draft model instead"),
    "speculation_type": ((None,), "choose a tree policy instead"),
    "output_attentions": ((None, False), "tree passes do not return attentions"),
    "output_hidden_states": ((None, False), "tree passes do not return hidden states"),
    "output_scores": ((None, False), "read result.steps instead"),
    "output_logits": ((None, False), "read result.steps instead"),
    "cache_implementation": ((None, "dynamic"), "the engine brings its own tree cache"),
    "use_cache": ((None, True), "trees are verified against a cache"),
}
# What a checkpoint's own configuration may carry and does not mean for a call of a decoder-only model.
_INHERITED = ("use_cache", "cache_implementation", "decoder_start_token_id")
# What a number or a flag must be: its type, a test, and the test in words.
_NUMBER = (int, float)
_SHARE: tuple[Any, ...] = (_NUMBER, lambda v: 0 <= v <= 1, "between 0 and 1")
_COUNT: tuple[Any, ...] = (int, lambda v: v >= 0, "a whole number, 0 for none")
_FLAG: tuple[Any, ...] = (bool, lambda v: True, "True or False")
_POSSIBLE: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "do_sample": _FLAG,
    "temperature": (_NUMBER, lambda v: 0 < v < inf, "positive and finite (0 selects greedy decoding)"),
    "top_p": (_NUMBER, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "top_k": (int, lambda v: v >= 0, "a count of tokens, or 0 for all of them"),
    **dict.fromkeys(("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"), _SHARE),
    "repetition_penalty": (_NUMBER, lambda v: 0 < v < inf, "positive and finite (1 is none)"),
    **dict.fromkeys(("max_new_tokens", "max_length"), (int, lambda v: v >= 1, "a whole number, at least 1")),
    **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens", "min_length"), _COUNT),
    "max_time": (_NUMBER, lambda v: v >= 0, "a number of seconds, 0 or more"),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "return_dict_in_generate"), _FLAG),
}
# Options that hold token ids: what they look like, and where the ids are.
_ONE = ("a token id", lambda v: [[v]])
_SOME = ("a token id, or a list of them", lambda v: [v] if isinstance(v, list | tuple) else [[v]])
_LIST = ("a list of token ids", lambda v: [list(v)])
_TOKENS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "eos_token_id": _SOME,
    "bad_words_ids": ("a list of lists of token ids", lambda v: [list(word) for word in v]),
    "sequence_bias": ("a dict from tuples of token ids to numbers", lambda v: _biased(v)),
    "suppress_tokens": _LIST,
    "begin_suppress_tokens": _LIST,
    "forced_bos_token_id": _ONE,
    "forced_eos_token_id": _SOME,
}
_NEVER_MET = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")  # outside the vocabulary, these do nothing
WARPERS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
PER_ROW = (  # options that a batch may have a list of, one value a row
    *("do_sample", *WARPERS, "repetition_penalty", "no_repeat_ngram_size"),
    *("max_new_tokens", "min_new_tokens", "max_length", "min_length"),
)
_DEFAULTS: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}


@dataclass(frozen=True)
class GenerationSettings:
    """Validated options of one call.  `config` is whole: defaults filled in from the model's, then Hugging Face's."""

    config: Any  # transformers.GenerationConfig
    eos: frozenset[int]
    max_new_tokens: int | None  # None: config.max_length decides per row
    processors: tuple[Callable[..., Tensor], ...]  # custom ones, in order
    criteria: tuple[Callable[..., Any], ...]  # custom stopping criteria

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end a text."""
        return _strings(self.config.stop_strings)

    @property
    def do_sample(self) -> bool:
        """Whether tokens are drawn; otherwise they are the argmax."""
        return bool(self.config.do_sample)

    def budget(self, prompt_length: int) -> int:
        """Return how many tokens a row with this prompt may emit, at least 1.

        Raises:
            InputError: ``max_length`` leaves no room after the prompt.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.config.max_length <= prompt_length:
            raise InputError(
                f"max_length={self.config.max_length} leaves no room after a prompt of {prompt_length} tokens: raise "
                "it or give max_new_tokens"
            )
        return self.config.max_length - prompt_length


def resolve(
    model_config: Any,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    vocab_size: int | None = None,
    whole: bool = False,
    **options: Any,
) -> GenerationSettings:
    """Merge options over a generation config over the model's own, and validate the whole.

    ``temperature=0`` means greedy; a positive temperature, top_p, top_k ... given without ``do_sample`` means sampling.
    Otherwise names and defaults are Hugging Face's (sampling has ``top_k=50`` unless told otherwise), but a call that
    names neither ``max_new_tokens`` nor ``max_length`` gets `DEFAULT_MAX_NEW_TOKENS`.

    Args:
        model_config: the model's own ``GenerationConfig``.
        generation_config: a ``GenerationConfig``, or a dict of options.
        logits_processor, stopping_criteria: callables, or one.
        vocab_size: of the target: token ids in options must be below it.
        whole: the generation config is over the model's already, and what is None in it is meant.
        **options: fields of ``GenerationConfig``; numbers may be numpy's or torch's.

    Raises:
        SamplingError: an unknown, contradictory, impossible or unsupported option, by name.
    """
    from transformers import GenerationConfig

    if isinstance(generation_config, dict):
        generation_config, options = None, {**generation_config, **options}
    if not isinstance(generation_config, GenerationConfig | None):
        raise SamplingError(
            f"generation_config={generation_config!r:.60} is no GenerationConfig and no dict of options"
        )
    given = {name: plain(value) for name, value in options.items() if value is not None}
    if unknown := sorted(str(name) for name in given if name not in vars(GenerationConfig())):
        raise SamplingError(f"unknown option {', '.join(unknown)}: options are those of transformers.GenerationConfig")
    config = copy.deepcopy(generation_config if generation_config is not None else model_config)
    for name, value in vars(config).items():
        setattr(config, name, value if name.startswith("_") else plain(value))
    if "do_sample" not in given:
        given |= _implied_sampling(given)
    if not given.get("do_sample", True):
        _check_greedy(given)
        given.pop("temperature", None)
    for name in vars(model_config):
        value = given.get(name, getattr(config, name, None))
        setattr(config, name, getattr(model_config, name) if value is None and not whole else value)
    for name in _INHERITED:
        if name not in given and getattr(config, name, None) == getattr(model_config, name, None):
            setattr(config, name, None)
    for name, value in given.items():
        setattr(config, name, value)
    for name, value in _DEFAULTS.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    _validate(config)
    _check_tokens(config, given, vocab_size)
    processors, criteria = _callables(logits_processor=logits_processor, stopping_criteria=stopping_criteria)
    limit = _max_new_tokens(config, given, generation_config)
    return GenerationSettings(config, _eos(config, vocab_size), limit, processors, criteria)


def by_row(options: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Return the options of each row: a list for one of `PER_ROW` holds a value per row, all else is every row's.

    Where there is no such list, one entry is returned for all rows.

    Raises:
        SamplingError: a list of another length.
    """
    lists = {name: plain(options[name]) for name in PER_ROW if isinstance(plain(options.get(name)), list | tuple)}
    for name, values in lists.items():
        if len(values) != rows:
            raise SamplingError(
                f"{name}={values!r:.60} has {len(values)} values: give one for all, or one per row ({rows})"
            )
    return [{**options, **{name: values[row] for name, values in lists.items()}} for row in range(rows if lists else 1)]


def whole_distribution(temperature: float) -> dict[str, Any]:
    """Return the options of greedy decoding (0), or of sampling from the whole distribution at a temperature."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def _implied_sampling(given: dict[str, Any]) -> dict[str, Any]:
    if "temperature" in given:
        return {"do_sample": given["temperature"] != 0}
    return {"do_sample": True} if any(name in given for name in WARPERS) else {}


def _check_greedy(given: dict[str, Any]) -> None:
    """Raise `SamplingError` for an option that says sample in a call that says do not."""
    neutral: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_k": (0, 50), "top_p": (1,), "typical_p": (1,)}
    neutral |= dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0,)) | {"top_h": ()}
    for name, values in neutral.items():
        if name in given and given[name] not in values:
            raise SamplingError(
                f"{name}={given[name]!r} has no effect in greedy decoding: leave it out, or sample with a temperature "
                "above 0"
            )


def _max_new_tokens(config: Any, given: dict[str, Any], user_config: Any) -> int | None:
    named = config.max_new_tokens
    length_named = "max_length" in given or getattr(user_config, "max_length", None) is not None
    if named is not None and not ("max_length" in given and "max_new_tokens" not in given):
        return int(named)
    return None if length_named else DEFAULT_MAX_NEW_TOKENS


def _eos(config: Any, vocab_size: int | None) -> frozenset[int]:
    """Return the tokens that end a text; what is none of the target's would mislead processors."""
    eos = config.eos_token_id
    every = [] if eos is None else [eos] if isinstance(eos, int) else eos
    return frozenset(token for token in every if 0 <= token < (vocab_size or inf))


def _validate(config: Any) -> None:
    """Raise `SamplingError` for an option that cannot be, by name."""
    for name, (neutral, reason) in _REFUSED.items():
        value = getattr(config, name, None)
        if not any(value is n or value == n for n in neutral):
            raise SamplingError(f"{name}={value!r} cannot be used with token trees: {reason}")
    for name, (kind, fits, wanted) in _POSSIBLE.items():
        value = getattr(config, name, None)
        if name == "temperature" and not config.do_sample:
            continue  # checkpoints write greedy decoding as 0
        if value is not None and (
            isinstance(value, bool) != (kind is bool) or not isinstance(value, kind) or not fits(value)
        ):
            raise SamplingError(f"{name}={value!r} is not possible: it must be {wanted}")
    if (config.min_new_tokens or 0) > (config.max_new_tokens or inf):
        raise SamplingError(f"min_new_tokens={config.min_new_tokens} exceeds max_new_tokens={config.max_new_tokens}")
    strings = config.stop_strings
    if not isinstance(strings, str | None) and not _is_list_of(str, strings):
        raise SamplingError(f"stop_strings={strings!r} is not possible: it must be a string or a list of strings")
    if not all(_strings(strings)):
        raise SamplingError("stop_strings holds an empty string, which would end every text at once: remove it")
    decay = config.exponential_decay_length_penalty
    if decay is not None and not (_is_list_of((int, float), decay) and len(decay) == 2 and all(map(isfinite, decay))):
        raise SamplingError(f"exponential_decay_length_penalty={decay!r} is not possible: it must be (start, factor)")


def _check_tokens(config: Any, given: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raise `SamplingError` for an option whose token ids are none of the target's.

    An end of sequence may be -1, which is no token, and a configuration's may be any: it is never met.
    """
    for name, (shape, parts) in _TOKENS.items():
        value = getattr(config, name, None)
        if value is None:
            continue
        try:
            ids = [token for part in parts(value) for token in part]
        except (TypeError, AttributeError, IndexError, ValueError):
            ids = [None]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise SamplingError(f"{name}={value!r:.60} is not possible: it must be {shape}")
        meant = name in given and not (name == "eos_token_id" and value in (-1, [-1]))
        outside = [token for token in ids if vocab_size is not None and not 0 <= token < vocab_size]
        if outside and (meant or name not in _NEVER_MET):
            raise SamplingError(f"{name}: token id {outside[0]} is not in the target's vocabulary [0, {vocab_size})")


def _biased(value: Any) -> list[list[int]]:
    """Return the sequences of a sequence_bias; raise ValueError for a bias that is no number."""
    pairs = list(value.items() if isinstance(value, dict) else value)
    if not _is_list_of((int, float), [bias for _, bias in pairs]) or any(isnan(bias) for _, bias in pairs):
        raise ValueError
    return [list(ids) for ids, _ in pairs]


def _callables(**given: Any) -> list[tuple[Callable[..., Any], ...]]:
    """Return what stands for each name as a tuple: one callable, or several."""
    found = []
    for name, value in given.items():
        several = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        for own in several:
            if not callable(own) or isinstance(own, type):
                raise SamplingError(
                    f"{name} holds {own!r:.60}, which cannot be called: give functions or objects that can"
                )
        found.append(several)
    return found


def _is_list_of(kind: Any, value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _strings(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


class Processors:
    """The target's distribution at a node, for one row: logits in, processed scores out.

    Args:
        processors: Hugging Face logits processors in the order they apply.
        padding: ids that processors see before the row's own (the left padding of a `transformers` batch).
    """

    def __init__(self, processors: Sequence[Callable[..., Tensor]], padding: Sequence[int] = ()) -> None:
        self.padding = list(padding)
        self.chain = [(processor, not _ignores_prefix(processor)) for processor in processors]
        self.reads_path = any(reads for _, reads in self.chain)

    @classmethod
    def of(cls, settings: GenerationSettings, prompt_length: int, device: torch.device) -> "Processors":
        """Build the processors of a row whose prompt has ``prompt_length`` tokens, in Hugging Face's order."""
        built = _processors(settings, prompt_length, device)
        warpers = _warpers(settings.config, device) if settings.do_sample else []
        return cls([*_merged(built, settings.processors), *warpers])

    def without_prefix_readers(self) -> "Processors":
        """Return the distribution without the processors that read a prefix (what a draft ranks its candidates by)."""
        return Processors([processor for processor, reads in self.chain if not reads])

    def scores(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Process logits (N, V) of N nodes whose ids so far are ``paths``; return float32 (or wider) scores (N, V).

        ``paths`` may be empty when `reads_path` is False.  Where nothing is to be done, the logits may be returned.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=bool(self.chain))
        if not self.chain:
            return scores
        nothing = torch.zeros(len(logits), 0, dtype=torch.long, device=logits.device)
        for processor, reads in self.chain:
            scores = self._by_path(processor, scores, paths) if reads else _asked(processor, nothing, scores)
        return scores

    def _by_path(self, processor: Callable[..., Tensor], scores: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Apply a prefix-reading processor, all paths of one length at a time."""
        for length in sorted({len(path) for path in paths}):
            rows = [i for i, path in enumerate(paths) if len(path) == length]
            ids = on_device([[*self.padding, *paths[i]] for i in rows], scores.device)
            places = on_device(rows, scores.device)
            scores[places] = _asked(processor, ids, scores[places])
        return scores


def _asked(processor: Callable[..., Tensor], ids: Tensor, scores: Tensor) -> Tensor:
    """Return a processor's scores; raise `SamplingError` for an answer that is none."""
    answer = processor(ids, scores)
    if not isinstance(answer, Tensor) or answer.shape != scores.shape:
        raise SamplingError(f"the logits processor {processor!r:.60} returns no scores: return them, changed")
    return answer


def _merged(built: Sequence[Any], custom: Sequence[Any]) -> list[Any]:
    """Return what was built with custom ones in the place of their own type, then the other custom ones."""
    merged = [next((own for own in custom if type(own) is type(made)), made) for made in built]
    return merged + [own for own in custom if not any(own is taken for taken in merged)]


def _ignores_prefix(processor: Any) -> bool:
    import transformers as hf

    names = ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta", "TopH")
    known = [getattr(hf.generation, f"{name}LogitsWarper", None) for name in names]
    known += [hf.generation.LogitNormalization, hf.generation.InfNanRemoveLogitsProcessor]
    return type(processor) in known


# One line of a table of processors: the option it serves, whether it is wanted, its class in transformers, arguments.
_Line = tuple[str, Any, str, tuple[Any, ...], dict[str, Any]]


def _processors(settings: GenerationSettings, prompt_length: int, device: Any) -> list[Callable[..., Tensor]]:
    """Processors that apply to greedy decoding and sampling alike (transformers' `_get_logits_processor` order)."""
    c, n, eos, on = settings.config, prompt_length, sorted(settings.eos), {"device": device}
    bias, decay, bad = c.sequence_bias, c.exponential_decay_length_penalty, c.bad_words_ids
    bos, last, suppress, first = (
        c.forced_bos_token_id,
        c.forced_eos_token_id,
        c.suppress_tokens,
        c.begin_suppress_tokens,
    )
    penalty, begin, end = c.repetition_penalty, n + (n == 1 and bos is not None), n + settings.budget(n)
    min_length = c.min_length if eos and not c.min_new_tokens else None
    lines: list[_Line] = [
        ("sequence_bias", bias is not None, "SequenceBiasLogitsProcessor", (bias,), {}),
        (
            "repetition_penalty",
            penalty not in (None, 1),
            "RepetitionPenaltyLogitsProcessor",
            (float(penalty or 1),),
            {},
        ),
        ("no_repeat_ngram_size", c.no_repeat_ngram_size, "NoRepeatNGramLogitsProcessor", (c.no_repeat_ngram_size,), {}),
        ("bad_words_ids", bad is not None, "NoBadWordsLogitsProcessor", (bad, eos or None), {}),
        ("min_length", min_length, "MinLengthLogitsProcessor", (min_length, eos), on),
        (
            "min_new_tokens",
            c.min_new_tokens and eos,
            "MinNewTokensLengthLogitsProcessor",
            (n, c.min_new_tokens, eos),
            on,
        ),
        ("forced_bos_token_id", bos is not None, "ForcedBOSTokenLogitsProcessor", (bos,), {}),
        ("forced_eos_token_id", last is not None, "ForcedEOSTokenLogitsProcessor", (end, last), on),
        ("remove_invalid_values", c.remove_invalid_values, "InfNanRemoveLogitsProcessor", (), {}),
        (
            "exponential_decay_length_penalty",
            decay is not None and eos,
            "ExponentialDecayLengthPenalty",
            (decay, eos, n),
            {},
        ),
        ("suppress_tokens", suppress is not None, "SuppressTokensLogitsProcessor", (suppress,), on),
        ("begin_suppress_tokens", first is not None, "SuppressTokensAtBeginLogitsProcessor", (first, begin), on),
    ]
    return _build(lines)


def _warpers(config: Any, device: Any) -> list[Callable[..., Tensor]]:
    """Warpers, which apply to sampling only, in transformers' order."""
    c, top_h = config, getattr(config, "top_h", None)

    def cuts(value: float | None) -> bool:
        return value is not None and 0 < value < 1

    lines: list[_Line] = [
        ("temperature", c.temperature != 1, "TemperatureLogitsWarper", (float(c.temperature),), {}),
        ("top_h", top_h is not None, "TopHLogitsWarper", (top_h,), {}),
        ("top_k", c.top_k, "TopKLogitsWarper", (c.top_k,), {}),
        ("top_p", c.top_p < 1, "TopPLogitsWarper", (float(c.top_p),), {}),
        ("min_p", c.min_p, "MinPLogitsWarper", (c.min_p,), {}),
        ("typical_p", cuts(c.typical_p), "TypicalLogitsWarper", (c.typical_p,), {}),
        ("epsilon_cutoff", cuts(c.epsilon_cutoff), "EpsilonLogitsWarper", (c.epsilon_cutoff,), {}),
        ("eta_cutoff", cuts(c.eta_cutoff), "EtaLogitsWarper", (c.eta_cutoff,), {"device": device}),
        ("renormalize_logits", c.renormalize_logits, "LogitNormalization", (), {}),
    ]
    return _build(lines)


def _build(lines: Iterable[_Line]) -> list[Callable[..., Tensor]]:
    """Construct the wanted processors; one that refuses its value is a `SamplingError` that names the option."""
    from transformers import generation

    built = []
    for option, wanted, name, arguments, keywords in lines:
        try:
            built += [getattr(generation, name)(*arguments, **keywords)] if wanted else []
        except (ValueError, TypeError) as error:
            raise SamplingError(f"{option} has an impossible value: {error}") from error
    return built

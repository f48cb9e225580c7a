"""The options of a call: merged over a checkpoint's, with the semantics of Hugging Face, and checked.

Knows: `GenerationConfig`, which options token trees can follow, stopping criteria by name.
Does not know: logits (`processors`), models, drafting, verification.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, NamedTuple, TypeGuard, TypeVar, TypeVarTuple

from transformers import GenerationConfig

from specinfer.common.advice import where_to_give
from specinfer.common.values import plain
from specinfer.engine.callables import BatchRow, Function, RowFunction, as_functions, for_row
from specinfer.engine.options import Options
from specinfer.errors import InputError, SamplingError
from specinfer.grammar.matcher import Matcher
from specinfer.prompts import is_text

DEFAULT_MAX_NEW_TOKENS = 128
T = TypeVar("T")
Rest = TypeVarTuple("Rest")

# Options that cannot work when one pass scores several branches, or that belong to another decoding method: names, the
# value that does nothing (None does nothing either), and why all others are refused.
_REFUSED: list[tuple[str, object, str]] = [
    ("num_beams num_beam_groups", 1, "beam search keeps several hypotheses; tree verification follows one"),
    ("diversity_penalty", 0, "it belongs to group beam search"),
    ("length_penalty", 1, "it belongs to beam search"),
    ("early_stopping", False, "it belongs to beam search"),
    ("constraints force_words_ids", None, "constrained beam search keeps several hypotheses"),
    ("dola_layers", None, "DoLa contrasts layers, which a tree pass does not return"),
    ("guidance_scale", 1, "guidance needs a second, unconditional pass per node"),
    ("watermarking_config", None, "watermarks keep a state per emitted token"),
    ("token_healing", False, "it rewrites the prompt"),
    ("encoder_repetition_penalty", 1, "it belongs to encoder-decoder models"),
    ("encoder_no_repeat_ngram_size", 0, "it belongs to encoder-decoder models"),
    ("decoder_start_token_id", None, "it belongs to encoder-decoder models"),
    ("prompt_lookup_num_tokens max_matching_ngram_size", None, 'use drafts=["ngram"] instead'),
    ("num_assistant_tokens", 20, "the growth policy says how much is drafted: give tree=Chain(20), for example"),
    ("num_assistant_tokens_schedule", "constant", 'the growth policy says how much is drafted: give tree="auto"'),
    ("assistant_confidence_threshold", 0.4, "give confidence_gate to SpeculativeDecoder"),
    ("assistant_early_exit", None, "use a draft model instead"),
    ("is_assistant", False, "a draft is given to SpeculativeDecoder"),
    ("assistant_lookbehind target_lookbehind", 10, "drafts of another tokenizer are read as text, whatever its length"),
    ("assistant_ensemble_weight", 0, "it is lossy by design"),
    ("use_mtp", False, "use a draft model instead"),
    ("speculation_type", None, "choose a tree policy instead"),
    ("output_attentions output_hidden_states", False, "tree passes do not return them"),
    ("output_scores output_logits", False, "give logprobs=True, and read result.logprobs"),
    ("cache_implementation", "dynamic", "the engine brings its own tree cache"),
    ("use_cache", True, "trees are verified against a cache"),
    ("low_memory", False, "the engine brings its own tree cache"),
    ("cache_config max_cache_len prefill_chunk_size", None, "the engine brings its own tree cache"),
    ("compile_config", None, "give compile to SpeculativeDecoder"),
    ("disable_compile", False, "give compile=False to SpeculativeDecoder"),
    ("continuous_batching_config", None, "use generate_many instead"),
]
# Options in a checkpoint's own configuration that mean nothing to a call of a decoder-only model.
_INHERITED = (
    *("use_cache", "cache_implementation", "decoder_start_token_id", "max_matching_ngram_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("is_assistant", "assistant_lookbehind", "target_lookbehind", "disable_compile"),
    *("length_penalty", "early_stopping", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config"),
)
# What transformers' `generate` takes beside fields of a configuration, or users give it: names, and what to do instead.
_INSTEAD = {
    name: advice
    for names, advice in [
        ("tokenizer", "leave it out: the decoder has one"),
        ("inputs", "give the prompt first, or token ids as input_ids"),
        ("inputs_embeds past_key_values cache encoder_outputs", "trees are decoded from token ids alone: leave it out"),
        ("prefix_allowed_tokens_fn", "give transformers' PrefixConstrainedLogitsProcessor as logits_processor"),
        ("negative_prompt_ids negative_prompt_attention_mask", "guidance needs a second pass per node: leave it out"),
        ("synced_gpus custom_generate use_model_defaults trust_remote_code", "leave it out"),
        ("return_tensors padding truncation skip_special_tokens", "it belongs to the tokenizer: leave it out"),
        ("presence_penalty", "give specinfer.engine.penalties.PresencePenalty as logits_processor"),
        ("frequency_penalty", "give specinfer.engine.penalties.FrequencyPenalty as logits_processor"),
        ("logit_bias", "give sequence_bias"),
    ]
    for name in names.split()
}
# What options must be: their names, type, a test, and the test in words.
_Number: tuple[type[float], ...] = (int, float)
_LEAST, _MOST = 1e-18, 1e18  # scores raised by the latter and divided by the former, even twice, are finite in float32
_POSSIBLE: list[tuple[str, type | tuple[type, ...], Callable[[Any], bool], str]] = [
    ("do_sample renormalize_logits", bool, lambda v: True, "True or False"),
    ("remove_invalid_values return_dict_in_generate", bool, lambda v: True, "True or False"),
    ("temperature", _Number, lambda v: _LEAST <= v < inf, f"positive and finite, {_LEAST} or more; 0 is greedy"),
    ("top_p", _Number, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("top_k", int, lambda v: v >= 0, "a count of tokens, or 0 for all of them"),
    ("penalty_alpha", _Number, lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("min_p typical_p epsilon_cutoff eta_cutoff top_h", _Number, lambda v: 0 <= v <= 1, "between 0 and 1"),
    ("repetition_penalty", _Number, lambda v: _LEAST <= v < inf, f"positive and finite, {_LEAST} or more (1 is none)"),
    ("max_new_tokens max_length num_return_sequences", int, lambda v: v >= 1, "a whole number, at least 1"),
    ("no_repeat_ngram_size min_new_tokens min_length", int, lambda v: v >= 0, "a whole number, 0 for none"),
    ("max_time", _Number, lambda v: v >= 0, "a number of seconds, 0 or more"),
    ("stop_strings", object, lambda v: _is_list_of(_strings(v), str), "a string or a list of strings"),
    ("pad_token_id bos_token_id", object, lambda v: _is_list_of(_items(v), int), "a token id"),
    ("exponential_decay_length_penalty", object, lambda v: _is_pair(v), "(start, factor)"),
]
# Options that hold token ids: their names, what they look like, and lists of the ids in them.
_TOKENS: list[tuple[str, str, Callable[[Any], Iterable[Iterable[object]]]]] = [
    ("eos_token_id forced_eos_token_id", "a token id, or a list of them", lambda v: [_items(v)]),
    ("bad_words_ids", "a list of lists of token ids", lambda v: v),
    ("sequence_bias", f"a dict from tuples of token ids to numbers up to {_MOST}", lambda v: _biased(v)),
    ("suppress_tokens begin_suppress_tokens", "a list of token ids", lambda v: [v]),
    ("forced_bos_token_id", "a token id", lambda v: [[v]]),
]
# Of these, ids outside the vocabulary do nothing.
_HARMLESS = ("eos_token_id", "suppress_tokens", "begin_suppress_tokens")
# Options of sampling only, and the values that a greedy call may give them.
_NEUTRAL: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_k": (0, 50), "top_h": ()}
_NEUTRAL |= dict.fromkeys(("top_p", "typical_p"), (1,)) | dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0,))
WARPERS = tuple(_NEUTRAL)
_NOTHING = _NEUTRAL | {"temperature": (), "top_k": (0,)}  # values that do nothing to a call that samples
PER_ROW = (  # options that a batch may have a list of, one value a row
    *("do_sample", *WARPERS, "penalty_alpha", "repetition_penalty", "no_repeat_ngram_size"),
    *("max_new_tokens", "min_new_tokens", "max_length", "min_length"),
)
_DEFAULTS: dict[str, object] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}


class Contrast(NamedTuple):
    """How the next token is chosen among the likeliest (`engine.contrastive`)."""

    alpha: float = 0.0  # weight of the penalty
    candidates: int = 1  # 1 is greedy decoding


@dataclass(frozen=True)
class GenerationSettings:
    """Validated options of one call.  `config` is complete: the model's own and Hugging Face's defaults are in it."""

    config: GenerationConfig
    eos: frozenset[int]
    max_new_tokens: int | None  # None: config.max_length decides per row
    processors: tuple[Function | RowFunction, ...]  # the caller's, in order: functions, or of one row (`of_row`)
    criteria: tuple[Function | RowFunction, ...]  # the caller's stopping criteria, likewise
    grammar: Matcher | None = None  # what the text may be, at its beginning; rows take copies

    @property
    def stop_strings(self) -> list[str]:
        """The strings that end a text."""
        return _strings(self.config.stop_strings)

    @property
    def do_sample(self) -> bool:
        """Whether tokens are drawn; otherwise they are the argmax."""
        return bool(self.config.do_sample)

    @property
    def sampling(self) -> dict[str, float]:
        """The options that make the distribution which tokens are drawn from; empty if they are not drawn."""
        asked = {name: getattr(self.config, name, None) for name in WARPERS} if self.do_sample else {}
        return {name: value for name, value in asked.items() if value is not None and value not in _NOTHING[name]}

    @property
    def contrast(self) -> Contrast:
        """Contrastive search's penalty and number of candidates, as in transformers: ``penalty_alpha``, ``top_k``."""
        asked = self.config.penalty_alpha and self.config.top_k > 1
        return Contrast(float(self.config.penalty_alpha), self.config.top_k) if asked else Contrast()

    @property
    def sequences(self) -> int:
        """How many texts a prompt gets: ``num_return_sequences``."""
        return self.config.num_return_sequences or 1

    def of_grammar(self, grammar: Matcher) -> "GenerationSettings":
        """Return the settings of texts that follow a grammar.

        Raises:
            SamplingError: nothing ends a text.
        """
        if not self.eos:
            advice = "give eos_token_id"
            raise SamplingError(f"a text of a grammar ends with an end of sequence, and there is none: {advice}")
        return replace(self, grammar=grammar)

    def of_row(self, row: BatchRow) -> "GenerationSettings":
        """Return the settings of one row, with functions of its own.

        Raises:
            SamplingError: rows would share what a function remembers.
        """
        if not self.processors and not self.criteria:
            return self
        processors, criteria = for_row(row, self.processors, self.criteria)
        return replace(self, processors=processors, criteria=criteria)

    def budget(self, prompt_length: int) -> int:
        """Return how many tokens a row with this prompt may emit, at least 1.

        Raises:
            InputError: the prompt is as long as ``max_length`` or longer.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.config.max_length <= prompt_length:
            length = f"max_length={self.config.max_length}"
            raise InputError(f"{length} leaves no room after {prompt_length} tokens: raise it or give max_new_tokens")
        return self.config.max_length - prompt_length

    def check_least(self, prompt_length: int) -> None:
        """Raise `SamplingError` unless a row with this prompt may reach its least length."""
        budget, name, least = self.budget(prompt_length), "min_new_tokens", self.config.min_new_tokens
        if not least:  # as in transformers, which else leaves min_length out
            name, least = "min_length", (self.config.min_length or 0) - prompt_length
        if least > budget:
            most = f"at most {budget} new tokens follow the prompt's {prompt_length}"
            raise SamplingError(
                f"{name}={getattr(self.config, name)} cannot be reached, {most}: lower it, or allow more"
            )


def resolve(
    model_config: GenerationConfig,
    generation_config: GenerationConfig | dict[str, object] | None = None,
    logits_processor: object = None,
    stopping_criteria: object = None,
    vocab_size: int | None = None,
    complete: bool = False,
    **options: object,
) -> GenerationSettings:
    """Merge options over a generation config over the model's own, and validate the result.

    ``temperature=0`` means greedy.  A positive temperature, top_p, top_k ... without ``do_sample`` means sampling, but
    with ``penalty_alpha`` contrastive search among ``top_k`` candidates (0 is greedy decoding).
    Otherwise names and defaults are Hugging Face's (sampling has ``top_k=50`` unless told otherwise), but a call that
    names neither ``max_new_tokens`` nor ``max_length`` gets `DEFAULT_MAX_NEW_TOKENS`.

    Args:
        model_config: the model's own ``GenerationConfig``.
        generation_config: a ``GenerationConfig``, or a dict of options.
        logits_processor, stopping_criteria: callables, or one.
        vocab_size: of the target: token ids in options must be below it.
        complete: the generation config holds the model's already, and a None in it is meant.
        **options: fields of ``GenerationConfig``; numbers may be numpy's or torch's.

    Raises:
        SamplingError: an unknown, contradictory, impossible or unsupported option, by name.
    """
    if isinstance(generation_config, dict):
        options, generation_config = {**generation_config, **options}, None
    if not isinstance(generation_config, GenerationConfig | None):
        raise SamplingError(f"generation_config={generation_config!r:.60} is neither a GenerationConfig nor a dict")
    given = {name: plain(value) for name, value in options.items() if value is not None}
    check_names(given)
    if "penalty_alpha" in given:
        given.setdefault("do_sample", False)
    if "do_sample" not in given and not given.keys().isdisjoint(WARPERS):
        given["do_sample"] = given.get("temperature") != 0
    if given.get("do_sample") and given.get("temperature") == 0:
        raise SamplingError("temperature=0 is greedy decoding, and do_sample=True draws: leave one of them out")
    if not given.get("do_sample", True):
        _check_greedy(given)
        given.pop("temperature", None)
    base = model_config if generation_config is None else generation_config
    merged = {name: None if complete else value for name, value in vars(model_config).items()}
    merged |= {name: plain(value) for name, value in vars(base).items() if value is not None}
    merged |= {name: None for name in _INHERITED if merged.get(name) == getattr(model_config, name, None)}
    merged |= {"max_new_tokens": None} if "max_length" in given else {}
    merged |= given
    merged |= {name: value for name, value in _DEFAULTS.items() if merged.get(name) is None}
    config = copy.copy(base)
    vars(config).update({name: _copied(name, value) for name, value in merged.items()})
    _check_options(config)
    _check_tokens(config, given, vocab_size)
    return GenerationSettings(
        config=config,
        eos=frozenset(token for token in _items(config.eos_token_id) if 0 <= token < (vocab_size or inf)),
        max_new_tokens=_max_new_tokens(config, given, generation_config),
        processors=as_functions("logits_processor", logits_processor),
        criteria=as_functions("stopping_criteria", stopping_criteria),
    )


def check_names(options: Iterable[str], here: Iterable[str] = (), elsewhere: Mapping[str, Iterable[str]] = {}) -> None:
    """Raise `SamplingError` for an option that is none of ``GenerationConfig``, with advice.

    Args:
        options: names.
        here: names of further options of the call.
        elsewhere: by call, names of the options that others take.
    """
    fields = list(vars(GenerationConfig()))
    for name in sorted(set(options) - set(fields), key=str):
        otherwise = "options are those of transformers.GenerationConfig"
        advice = _INSTEAD.get(name) or where_to_give(str(name), [*fields, *here], elsewhere, otherwise)
        raise SamplingError(f"unknown option {name!s:.60}: {advice}")


def by_row(options: Mapping[str, Any], rows: int) -> list[dict[str, Any]]:
    """Return the options of each row: a list for one of `PER_ROW` holds a value per row, all else is every row's.

    Without such a list, one entry is returned for all rows.

    Raises:
        SamplingError: a list of another length.
    """
    lists = {name: value for name in PER_ROW if isinstance(value := plain(options.get(name)), list | tuple)}
    for name, values in lists.items():
        if len(values) != rows:
            raise SamplingError(f"{name}={values!r:.60} has {len(values)} values: give one, or one per row ({rows})")
    return [{**options, **{name: values[row] for name, values in lists.items()}} for row in range(rows if lists else 1)]


def whole_distribution(temperature: float, max_new_tokens: int) -> Options:
    """Return the options of greedy decoding (0), or of sampling from the whole distribution at a temperature.

    To transformers they mean the same distribution.
    """
    if not temperature:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def _check_greedy(given: dict[str, object]) -> None:
    """Raise `SamplingError` for an option of sampling in a call that draws nothing."""
    contrastive = "penalty_alpha" in given
    method = "contrastive search" if contrastive else "greedy decoding"
    advice = "leave out penalty_alpha" if contrastive else "sample with a temperature above 0"
    for name, values in _NEUTRAL.items():
        if name in given and given[name] not in values and not (contrastive and name == "top_k"):
            raise SamplingError(f"{name}={given[name]!r} has no effect in {method}: leave it out, or {advice}")


def _max_new_tokens(config: GenerationConfig, given: dict[str, object], user_config: object) -> int | None:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    if "max_length" in given or getattr(user_config, "max_length", None) is not None:
        return None
    if (config.min_new_tokens or 0) > DEFAULT_MAX_NEW_TOKENS:
        usual = f"the {DEFAULT_MAX_NEW_TOKENS} that a text has at most by default"
        raise SamplingError(f"min_new_tokens={config.min_new_tokens} exceeds {usual}: give max_new_tokens")
    return DEFAULT_MAX_NEW_TOKENS


def _check_options(config: GenerationConfig) -> None:
    """Raise `SamplingError` for an option that cannot be used or has an impossible value, by name."""
    for name, value, neutral, reason in _present(config, _REFUSED):
        if value != neutral:
            raise SamplingError(f"{name}={value!r} cannot be used with token trees: {reason}")
    for name, value, kind, fits, wanted in _present(config, _POSSIBLE):
        if name == "temperature" and not config.do_sample:
            continue  # checkpoints may write greedy decoding as 0
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind) or not fits(value):
            text = ", and this is text" if isinstance(value, str) else ""
            raise SamplingError(f"{name}={value!r:.60} is not possible: it must be {wanted}{text}")
    if config.penalty_alpha and (config.do_sample or not config.top_k):
        clash = "do_sample=True" if config.do_sample else "top_k=0"
        advice = "contrastive search chooses among a few of the likeliest tokens: give do_sample=False and top_k=4"
        raise SamplingError(f"penalty_alpha={config.penalty_alpha!r} cannot be used with {clash}: {advice}")
    if (config.min_new_tokens or 0) > (config.max_new_tokens or inf):
        raise SamplingError(f"min_new_tokens={config.min_new_tokens} exceeds max_new_tokens={config.max_new_tokens}")
    if (config.num_return_sequences or 1) > 1 and not config.do_sample:
        many = f"num_return_sequences={config.num_return_sequences}"
        raise SamplingError(
            f"{many} would be the same text again and again without sampling: give a temperature above 0"
        )
    if not all(map(is_text, _strings(config.stop_strings))):
        raise SamplingError("stop_strings holds half a surrogate pair, which no text does: remove it")
    if not all(_strings(config.stop_strings)):
        raise SamplingError("stop_strings holds an empty string, which would end every text at once: remove it")


def _check_tokens(config: GenerationConfig, given: Mapping[str, object], vocab_size: int | None) -> None:
    """Raise `SamplingError` for an option whose token ids are not the target's.

    An end of sequence may be -1, which is not a token.  In a configuration it may be any id: it does nothing there.
    """
    for name, value, shape, parts in _present(config, _TOKENS):
        try:
            ids = [token for part in parts(value) for token in part]
        except (TypeError, AttributeError, IndexError, ValueError):
            ids = [None]
        ids = [None] if isinstance(value, str | bytes) else ids
        if not _is_list_of(ids, int):
            raise SamplingError(f"{name}={value!r:.60} is not possible: it must be {shape}")
        meant = name in given and not (name == "eos_token_id" and value in (-1, [-1]))
        outside = [token for token in ids if vocab_size is not None and not 0 <= token < vocab_size]
        if outside and (meant or name not in _HARMLESS):
            raise SamplingError(f"{name}: token id {outside[0]} is not in the target's vocabulary [0, {vocab_size})")


def _biased(value: Any) -> list[Iterable[object]]:
    """Return the sequences of a sequence_bias; raise ValueError for a bias that is not a number, or too large."""
    pairs = list(value.items() if isinstance(value, dict) else value)
    if not _is_list_of([bias for _, bias in pairs], _Number) or not all(bias <= _MOST for _, bias in pairs):
        raise ValueError
    return [ids for ids, _ in pairs]


def _copied(name: str, value: object) -> object:
    """Return a copy of an option's value: a call changes nothing of its caller's."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise SamplingError(f"{name}={value!r:.60} is not possible ({error}): give a plain value") from error


def _is_list_of(value: object, kind: type[T] | tuple[type[T], ...]) -> TypeGuard[Collection[T]]:
    return isinstance(value, list | tuple | set) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _is_pair(value: object) -> bool:
    return _is_list_of(value, _Number) and len(value) == 2 and all(map(isfinite, value))


def _items(value: object) -> list[Any]:
    """Return one value, several or None as a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _strings(value: object) -> list[str]:
    return list(value) if isinstance(value, set) else _items(value)


def _present(config: GenerationConfig, table: Sequence[tuple[str, *Rest]]) -> Iterator[tuple[str, Any, *Rest]]:
    """Yield the name and value of each option of a table that is not None, with the rest of its line."""
    for line in table:
        for name in line[0].split():
            if (value := getattr(config, name, None)) is not None:
                yield (name, value, *line[1:])

"""The options of a call, with their types: what editors complete, type checkers check and `help` shows.

Knows: names and types.  Does not know: what values are possible (`sampling`), what options do.

Every method takes them as ``**options: Unpack[Options]``, so they are written once.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack, cast, get_args, get_type_hints

from transformers.generation import BaseStreamer, GenerationConfig

from specinfer.common.chat import ChatOptions
from specinfer.grammar.asked import GrammarOptions
from specinfer.prompts import Inputs

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., object])
PerRow: TypeAlias = T | Sequence[T | None] | None  # one value, or in a batch one per row
Functions: TypeAlias = Sequence[Callable[..., object]] | Callable[..., object] | None
TokenIds: TypeAlias = int | Sequence[int] | None


class UsualOptions(TypedDict, total=False):
    """What most calls say.

    Attributes:
        max_new_tokens: at most; 128, unless a length is given otherwise.
        temperature: 0 is greedy.  A positive one without ``do_sample`` means sampling, and so do the next two.
        top_p: tokens are drawn from the likeliest ones that together have this probability.
        top_k: tokens are drawn from as many of the likeliest ones; 50 in sampling, as in transformers, and 0 is all.
        stop_strings: each ends the text in which it appears.
        seed: of all rows, or one per row; a row's text depends on its own seed only.  None draws one per row
            from torch's global generator.  Of ``num_return_sequences`` of a prompt, the first has the seed, the
            second the seed plus 1, and so on; without a seed, each has its own.
    """

    max_new_tokens: PerRow[int]
    temperature: PerRow[float]
    top_p: PerRow[float]
    top_k: PerRow[int]
    stop_strings: str | Sequence[str] | set[str] | None
    seed: int | Sequence[int] | None


class ConfigOptions(TypedDict, total=False):
    """The other fields of transformers' ``GenerationConfig`` that token trees can follow.

    Attributes:
        do_sample: whether tokens are drawn.
        min_new_tokens: the text does not end before.
        max_length: of prompt and text.
        min_length: of prompt and text.
        max_time: in seconds, after which a call ends its texts.
        min_p: tokens less likely than this share of the likeliest one's probability are not drawn.
        top_h: the entropy of what is drawn from, as a share of the whole distribution's.
        typical_p: locally typical sampling.
        epsilon_cutoff: tokens less likely than this are not drawn.
        eta_cutoff: the same, with a bound that depends on the entropy.
        penalty_alpha: contrastive search among ``top_k`` candidates.
        repetition_penalty: divides the scores of tokens that are there already; 1 is none.
        no_repeat_ngram_size: n-grams of this size are not repeated.
        bad_words_ids: sequences of token ids that are not written.
        sequence_bias: what is added to the scores of sequences of token ids.
        suppress_tokens: token ids that are not written.
        begin_suppress_tokens: token ids that do not begin the text.
        forced_bos_token_id: the token after a prompt of one token.
        forced_eos_token_id: the last token of a text that becomes too long.
        exponential_decay_length_penalty: the token from which the end becomes likelier, and the factor per token.
        remove_invalid_values: replace scores that are not numbers.
        renormalize_logits: normalise what processors leave.
        eos_token_id: what ends a text; -1 for nothing.
        pad_token_id: checked; rows are not padded.
        bos_token_id: checked; prompts begin as the tokenizer begins them.
        return_dict_in_generate: for `custom_generate`; others return results anyway.
    """

    do_sample: PerRow[bool]
    min_new_tokens: PerRow[int]
    max_length: PerRow[int]
    min_length: PerRow[int]
    max_time: float | None
    min_p: PerRow[float]
    top_h: PerRow[float]
    typical_p: PerRow[float]
    epsilon_cutoff: PerRow[float]
    eta_cutoff: PerRow[float]
    penalty_alpha: PerRow[float]
    repetition_penalty: PerRow[float]
    no_repeat_ngram_size: PerRow[int]
    bad_words_ids: Sequence[Sequence[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[object] | None
    suppress_tokens: Sequence[int] | None
    begin_suppress_tokens: Sequence[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: TokenIds
    exponential_decay_length_penalty: Sequence[float] | None
    remove_invalid_values: bool | None
    renormalize_logits: bool | None
    eos_token_id: TokenIds
    pad_token_id: TokenIds
    bos_token_id: TokenIds
    return_dict_in_generate: bool | None


class Options(UsualOptions, GrammarOptions, ChatOptions, Inputs, ConfigOptions, total=False):
    """All options of a call: of `UsualOptions`, `GrammarOptions`, `ChatOptions`, `Inputs`, `ConfigOptions`, and these.

    None is not given; `raw` is True or False.  Where the type says so, a batch may have a list with one
    value per row.

    Attributes:
        raw: feed strings without the chat template.  Strings that begin as the template's texts do are always fed so.
        logprobs: True keeps the target's log-probability of every new token: `Result.logprobs`.  A number k keeps those
            of the k likeliest tokens beside it: `Result.top_logprobs`.
        prediction: what the text may repeat, as text or token ids, an earlier version of a file for example: one more
            text that look-up drafts propose from, for all prompts of the call.  The result's text does not change.
        generation_config: a ``transformers.GenerationConfig`` or a dict of options, over the model's own.
        logits_processor: functions of ids (B, T) and scores (B, V) that return scores, or one, as in transformers.
            Each is called once for every token of a row's text, in order, with B copies of the row; of the answer
            the line of the row's number counts.  An object is copied for each row, so it may keep state.  A
            function of one argument, the row's number, returns the row's own function, which sees (1, T).
        stopping_criteria: functions of ids that return True or False, or one for each row, likewise.
        cache_salt: a text begins with what others have read only if theirs is the same: see `PrefixStore`.
    """

    raw: bool
    logprobs: bool | int
    prediction: str | Sequence[int] | None
    generation_config: GenerationConfig | dict[str, Any] | None
    logits_processor: Functions
    stopping_criteria: Functions
    cache_salt: str | None


class GenerateOptions(Options, total=False):
    """What `SpeculativeDecoder.generate` takes beside them; its docstring says what they do."""

    streamer: BaseStreamer | None
    keep_stop_string: bool
    max_rows: int


class ScoreOptions(ChatOptions, total=False):
    """What `SpeculativeDecoder.score` takes; its docstring says what they do."""

    raw: bool
    max_rows: int
    top_logprobs: int


def names(kind: type) -> list[str]:
    """Return the keys of a `TypedDict`."""
    return list(kind.__annotations__)


def part(options: Mapping[str, object], kind: type[T]) -> T:
    """Return those of some options that are a `TypedDict`'s and that were given, in its order."""
    return cast(T, {name: options[name] for name in names(kind) if options.get(name) is not None})


def spelled_out(function: Function) -> Function:
    """Show the options of ``**options: Unpack[...]`` in a function's signature, to `help` and notebooks.

    Those of `ConfigOptions` stay together.  What is not given is None, and False where the type is bool.
    """
    signature, together = inspect.signature(function), {*names(ConfigOptions)}
    *parameters, packed = signature.parameters.values()
    (kind,) = get_args(packed.annotation)
    parameters += [
        inspect.Parameter(name, packed.KEYWORD_ONLY, default=False if hint is bool else None, annotation=hint)
        for name, hint in get_type_hints(kind).items()
        if name not in together
    ]
    rest = [packed.replace(annotation=Unpack[ConfigOptions])] if together <= {*names(kind)} else []
    vars(function)["__signature__"] = signature.replace(parameters=[*parameters, *rest])
    return function

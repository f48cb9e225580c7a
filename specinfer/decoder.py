"""`SpeculativeDecoder`: text from one prompt or a ragged batch, at once or streamed.

Knows: what can be checked before a model runs, and how a call becomes requests of a `Scheduler`.
Does not know: how a step is decoded (`engine.loop`), which requests run when (`engine.scheduler`).
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, cached_property, partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any, TypeGuard, Unpack, cast, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, GenerationConfig

from specinfer import loading
from specinfer.adaptive.policy import Auto
from specinfer.attention import Support, TreeModel, check_model
from specinfer.attention.packed.modules import round_states, rounds_states
from specinfer.attention.passes.registry import equip
from specinfer.calls.many import Finished, finished
from specinfer.calls.run import Run
from specinfer.calls.scoring import Score, continuations, score
from specinfer.calls.text_stream import TextStream
from specinfer.common.advice import did_you_mean
from specinfer.common.chat import ChatOptions
from specinfer.common.memory import give_back
from specinfer.common.model_options import DeviceMap, checked_options
from specinfer.common.ranks import ALONE, Ranks
from specinfer.common.threads import release_workers
from specinfer.common.values import checked_count, checked_flag, checked_logprobs, plain
from specinfer.drafts import ranking
from specinfer.drafts.bundled import bundled_drafts
from specinfer.drafts.head import MODEL_TYPE, HeadDraft
from specinfer.drafts.language_model import ModelDraft
from specinfer.drafts.lookup.lookahead import LookaheadDraft
from specinfer.drafts.lookup.memory import Memory, checked_memory
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.lookup.recycling import RecyclingDraft
from specinfer.drafts.lookup.suffix import SuffixDraft, with_memory
from specinfer.drafts.online import checked_share, learners, save_heads
from specinfer.drafts.published.formats import draft_config, load_published, may_be_head
from specinfer.drafts.published.mtp import MtpDraft
from specinfer.drafts.through_text import ThroughTextDraft
from specinfer.engine.callables import FUNCTIONS, BatchRow, as_functions, for_row
from specinfer.engine.contrastive import sized
from specinfer.engine.draft import Draft
from specinfer.engine.options import GenerateOptions, Options, ScoreOptions, names, part, spelled_out
from specinfer.engine.requests import Request, make_requests
from specinfer.engine.sampling import by_row, check_names, resolve
from specinfer.engine.scheduler import MAX_ROWS, Scheduler
from specinfer.engine.sequence import Stopping
from specinfer.engine.store import PrefixStore, checked_salt
from specinfer.engine.verify import Verifier, chosen_verifier
from specinfer.errors import InputError, ModelError, TokenizerMismatch, UnsupportedModel
from specinfer.grammar.asked import GrammarOptions, asked
from specinfer.grammar.guidance import Guidance
from specinfer.prompts import Inputs, OnePrompt, Prompt, Prompts, check_beside, check_ids, encode, tokenized
from specinfer.results import Result
from specinfer.tree import BestFirst, Chain, Kind, Policy
from specinfer.tree.token_tree import MOST_DRAFTS

DRAFT_FORM = "int4"  # to which language models that draft are rounded if nothing else is asked for
NAMED: dict[str, Callable[[], Draft]] = {  # words for drafts that need no files
    "ngram": NGramDraft,
    "suffix": SuffixDraft,
    "recycling": RecyclingDraft,
    "lookahead": LookaheadDraft,
    "mtp": MtpDraft,
}
WORDS = ("auto", "bundled", *NAMED)  # words for drafts; others are names of models
METHODS = {  # that take other options than `open`, and their names for advice; what several take is the last one's
    "generate": "generate",
    "from_pretrained": "SpeculativeDecoder.from_pretrained",
    "__init__": "SpeculativeDecoder",
}
TREES = ("auto", "BestFirst", "Expansion", "Chain", "Sampled")  # a word, and classes
OURS = frozenset(names(Options)) - vars(GenerationConfig()).keys()  # options that transformers does not know
DEFAULT_TREE = BestFirst(max_nodes=16, max_depth=8, min_probability=0.05)
PADDING = 128  # of embeddings beyond the tokens, at most, by which models of one family differ
KEPT = 1000  # megabytes of what rows of one call have read, for prompts to come
CHAIN = 8  # length of the chain that is taken where "auto" may not branch


class SpeculativeDecoder:
    """Generates text with a target model, token trees and drafts; the output distribution is the target's.

    Args:
        model: the target, a ``transformers`` causal LM.
        tokenizer: the target's; needed for text in and out.
        drafts: `Draft` objects, draft models, or words.  All of them propose, and their trees are merged.
            ``"suffix"``, ``"recycling"``, ``"lookahead"``, ``"ngram"``: drafts without weights.
            ``"mtp"``: the target's own multi-token prediction layer, if it was released with one.
            ``"bundled"``: the heads that come with the package for this target, if any.
            ``"auto"``: the first of those and n-grams (with a memory: suffixes); or else recycled tokens and suffixes.
        tree: the growth policy; None decodes without speculation.  ``"auto"`` is ``Auto()``, which chooses sizes step
            by step and keeps what it learns for later calls.
        verifier: by default `ExactMatch` for ranked trees (greedy, or sampling coupled to the seed) and `MultiStep` for
            sampled ones.
        confidence_gate: between 0 and 1; nothing is drafted after a token to which the target gave a smaller
            probability.  It is a published method, for comparison; None, the default, is no gate.
        graphs: replay passes over a few tokens as CUDA graphs.  They are captured when a shape has come a few times,
            and kept, with the caches that they read, for later calls (docs/gpu.md).
        compile: "auto" uses the passes that `specinfer compile` made for models like these on this machine, if any.
            True makes them, which takes minutes, once.  False runs the models as they are.  See `passes`.
        memory: a `Memory` of earlier texts, or the path of one, from which the suffix draft also proposes.  None, the
            default: a row drafts from its own text.
        online: EAGLE-style heads learn from their own use, between calls, for at most this share of the calls' time;
            True is 0.05.  Text stays the target's.  See `save_drafts`.

    Attributes:
        memory: the same, as a `Memory`; every call adds its texts.

    Raises:
        InputError: a bad tokenizer, draft, tree, verifier, gate or memory; a memory without a suffix draft; graphs
            without a GPU; online, and no draft learns.
        PolicyError: the policy would cut a draft's nodes that must be scored (lookahead).
        ModelError: not a model.
        UnsupportedModel: a model cannot score trees, by name and with the reason.
        TokenizerMismatch: a draft has other tokens than the target, which cannot be translated or must not be; or the
            memory has.
        PairingError: the verifier would be biased on this policy's trees.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        drafts: Sequence[object] | str = "auto",
        tree: Policy | str | None = "auto",
        *,
        verifier: Verifier | None = None,
        confidence_gate: float | None = None,
        graphs: bool = False,
        compile: bool | str = "auto",
        memory: Memory | str | os.PathLike[str] | None = None,
        online: bool | float = False,
    ) -> None:
        self.notes: list[str] = []
        gate = plain(confidence_gate)
        _check_arguments(model, tokenizer, gate)
        self.target, self.confidence_gate = TreeModel(model), gate
        self.tokenizer: Any = tokenizer
        self.graphs = checked_flag("graphs", graphs)
        policy, share = _as_policy(tree), checked_share(online)
        self.verifier, self.memory = chosen_verifier(verifier, policy.kind), checked_memory(memory)
        ready, notes = learners(self._ready(_as_list(drafts)) if tree is not None else [], share)
        self.drafts = [self._attached(draft) for draft in with_memory(ready, self.memory)]
        self.notes += [*notes, *(note for draft in self.drafts for note in draft.notes)]
        if self.drafts and self.target.device.type == "cpu":
            ranking.library()  # on a new machine it is compiled here, in a second, and not in a step
        if graphs and any(model.dispatched for model in self.networks):
            raise InputError("graphs=True replays passes, and a model's hooks move weights or inputs: leave it out")
        if graphs and (elsewhere := {model.device.type for model in self.networks} - {"cuda"}):
            raise InputError(f"graphs=True is for GPUs, and a model is on the {', '.join(elsewhere)}: leave it out")
        if graphs and self.target.ranks.size > 1:
            raise InputError("graphs=True is for a target in one process: leave it out")
        self.policy = self.supported(policy, self.notes)
        for draft in self.drafts:
            if (suited := draft.suited(self.policy)) is not self.policy:
                self.policy = suited
                self.notes.append(f"tree={suited}: {draft.name} has nodes that must not be cut")
        self.verifier.check(self.policy.kind)
        self.aux_layers = sorted({layer for draft in self.drafts for layer in draft.aux_layers})
        if unknown := [layer for layer in self.aux_layers if layer not in range(self.target.layers + 1)]:
            raise InputError(f"aux_layers={unknown}: the target's hidden states are 0 to {self.target.layers}")
        for network in self.networks:
            is_head = network is not self.target and hasattr(network.model, "pass_inputs")
            aux_layers = self.aux_layers if network is self.target else [0] if is_head else []
            equip(network, aux_layers, plain(compile), rounded=is_head)
        release_workers()  # another thread may decode

    @classmethod
    def from_pretrained(
        cls,
        target: str | None = None,
        drafts: Sequence[object] | str = "auto",
        tree: Policy | str | None = "auto",
        *,
        verifier: Verifier | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        confidence_gate: float | None = None,
        graphs: bool = False,
        compile: bool | str = "auto",
        memory: Memory | str | os.PathLike[str] | None = None,
        online: bool | float = False,
        device_map: DeviceMap = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        tensor_parallel: int = 1,
        quantize: str | None = None,
        activations: str | None = None,
        **model_kwargs: object,
    ) -> "SpeculativeDecoder":
        """Load target and drafts by name or path; None is the default target (SmolLM2-135M-Instruct).

        Args:
            device_map, max_memory, offload_folder: where the target's layers go: see `loading.load`.  Drafts are in
                memory.
            tensor_parallel: processes that the target is spread over; drafts are whole in each.  See `loading.load`.
            quantize: "int8" or "int4" rounds the target, and drafts that are models, to 8 or 4 bits (`loading.load`).
                Without it and without a dtype, models named as drafts have 4 bits where that is faster, on a CPU.
            activations: "int8" lets products with the target's packed weights round states to 8 bits (`loading.load`);
                drafts' do unless a dtype is given.
            **model_kwargs: further options of transformers' `from_pretrained`, for the target.

        Raises:
            ModelError: a model cannot be found or loaded, or an option is unknown or not possible; and what the
                constructor raises.
            RankError: another number of processes was started.
        """
        checked_options(model_kwargs, inspect.signature(cls.from_pretrained).parameters)
        if target is not None and not _is_name(target):
            raise ModelError(f"target={target!r:.60} is not a name: a loaded model goes to SpeculativeDecoder")
        loaded = loading.load(
            target,
            dtype,
            device,
            device_map,
            max_memory,
            offload_folder,
            tensor_parallel,
            quantize,
            activations,
            **model_kwargs,
        )
        ready = [
            load_draft(os.fspath(draft), dtype, device, quantize) if _is_name(draft) and draft not in WORDS else draft
            for draft in _as_list(drafts)
        ]
        made = cls(
            loaded.model,
            loaded.tokenizer,
            ready,
            tree,
            verifier=verifier,
            confidence_gate=confidence_gate,
            graphs=graphs,
            compile=compile,
            memory=memory,
            online=online,
        )
        packed = [network.model.parameters() for network in made.networks if network.ways.fast]  # which read copies
        give_back(chain.from_iterable(packed))
        return made

    def __repr__(self) -> str:
        drafts = [draft.name for draft in self.drafts]
        return f"SpeculativeDecoder({self.target.name}, drafts={drafts}, tree={self.policy!r})"

    @property
    def networks(self) -> list[TreeModel]:
        """Everything that runs passes: the target, and drafts that are models or heads."""
        return [self.target, *(draft.model for draft in self.drafts if isinstance(draft.model, TreeModel))]

    @cached_property
    def guidance(self) -> Guidance:
        """What compiles grammars for the target's tokenizer."""
        return Guidance(self.tokenizer, self.target.vocab_size)

    @property
    def passes(self) -> str:
        """How the passes of target and drafts run, and why some are not compiled, in one line."""
        ways = [f"{model.ways}{' (activations in 8 bits)' * rounds_states(model.model)}" for model in self.networks]
        names = ["target", *(draft.name for draft in self.drafts if isinstance(draft.model, TreeModel))]
        named = [f"{name} {way}" for name, way in zip(names, ways, strict=True)]
        return f"passes: {', '.join(named if len(set(ways)) > 1 else ways[:1])}"

    @property
    def language_models(self) -> list[TreeModel]:
        """The target, and drafts that are language models."""
        return [self.target, *(draft.model for draft in self.drafts if isinstance(draft, ModelDraft))]

    @overload
    def generate(
        self, prompt: Prompt = None, *, num_return_sequences: int | None, **options: Unpack[GenerateOptions]
    ) -> Any: ...

    @overload
    def generate(self, prompt: OnePrompt, **options: Unpack[GenerateOptions]) -> Result: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **options: Unpack[GenerateOptions]) -> list[Result]: ...

    @overload
    def generate(self, prompt: Prompt = None, **options: Unpack[GenerateOptions]) -> Any: ...

    @spelled_out
    def generate(
        self,
        prompt: Prompt = None,
        *,
        streamer: BaseStreamer | None = None,
        keep_stop_string: bool = True,
        max_rows: int = MAX_ROWS,
        num_return_sequences: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Generate to the end.

        Args:
            prompt: a string, chat messages or token ids; a list of those for a ragged batch; or what a tokenizer
                returns.
            streamer: a ``transformers`` streamer (one prompt only).
            keep_stop_string: False cuts the text before the stop string that ended it; token ids stay.
            max_rows: of a batch, rows decoded at a time; the others wait, and join as some end.
            num_return_sequences: texts of each prompt.
            **options: see `Options`.

        Returns:
            Result for one prompt, list[Result] for a batch.  With ``num_return_sequences=n``, a list of n for one
            prompt, and for a batch the first prompt's n, then the second's, and so on.

        Raises:
            SpecinferError: what `open` raises; or NumericalError later, whose ``partial`` holds the results so far.
        """
        rows = checked_count("max_rows", max_rows, 1)
        asked = {**options, "num_return_sequences": num_return_sequences}
        run = Run(*self._prepared(prompt, asked, keep_stop_string), max_rows=rows)
        run.finish(streamer)
        results = run.results()
        return results[0] if run.single else results

    @spelled_out
    def generate_many(
        self,
        prompts: Iterable[object],
        *,
        max_rows: int = MAX_ROWS,
        keep_stop_string: bool = True,
        **options: Unpack[Options],
    ) -> Iterator[Finished]:
        """Generate for any number of prompts, a few at a time, and yield what finishes as it does.

        A prompt joins the running rows when another has ended.  Batching never changes a row's text.  Prompts are asked
        for as they are needed, and beside the rows under way at most 1 GB of what others have read is kept, so an
        endless iterator is fine.

        Args:
            prompts: each as for `generate`; or a dict of that as "prompt" and of options for it alone,
                for example ``{"prompt": "Why?", "seed": 7, "temperature": 0.5}``.
            max_rows: rows decoded at a time.
            keep_stop_string: as `generate`.
            **options: see `Options`.  A seed is the same for all; without one, each prompt has its own.

        Returns:
            an iterator of `Finished`: the prompt's number from 0, and its result or the error that it is refused with.
            Such an error does not stop the others.

        Raises:
            SpecinferError: before any model runs, for what is wrong with every prompt; NumericalError later, whose
                ``partial`` holds the results of the rows under way so far.
        """
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts={prompts!r:.60} is not several prompts: give a list or use generate")
        seed = options.get("seed")
        common: dict[str, object] = {**options}
        request_of = partial(self._one_of_many, common, checked_flag("keep_stop_string", keep_stop_string))
        first = row_seeds(0 if seed is None else seed, 1)
        said = common.keys() & {"max_new_tokens", "max_length", "generation_config"}
        length = {} if said else {"max_length": 2}  # prompts may say
        self._one_of_many({**length, **common, "seed": first}, True, [0], 0, short=True)  # or it raises
        return finished(self.scheduler(max_rows, PrefixStore(KEPT)), prompts, request_of)

    def _one_of_many(
        self, common: Mapping[str, object], keep_stop_string: bool, prompt: object, number: int, short: bool = False
    ) -> Request:
        """Return the request of one of many prompts, with options of its own over common ones."""
        given = dict(prompt) if isinstance(prompt, Mapping) and "prompt" in prompt else {"prompt": prompt}
        functions = for_row(BatchRow(number, None), *(as_functions(name, common.get(name)) for name in FUNCTIONS))
        asked = {**common, **dict(zip(FUNCTIONS, functions, strict=True)), **given}
        (request, *_), single = self._prepared(asked.pop("prompt"), asked, keep_stop_string, number, short=short)
        if not single:
            raise InputError("one of many prompts is a list, or asks for several texts: give each its own prompt")
        return request

    @spelled_out
    def stream(
        self, prompt: Prompt = None, *, scheduler: Scheduler | None = None, **options: Unpack[Options]
    ) -> TextStream:
        """Generate one prompt piece by piece: iterate over the text; `TextStream.result` has the rest.

        In a coroutine iterate with ``async for``.  For options see `Options`.

        Args:
            prompt: as `generate`.
            scheduler: of this decoder.  Streams that are given the same one, in any threads, share its passes; whoever
                iterates takes a step for all.  None: the stream's own.
            **options: see `Options`.

        Raises:
            InputError: a batch, or no tokenizer.
        """
        (request, *_), single = self._prepared(prompt, options)
        if not single:
            raise InputError("stream takes one prompt, for one text: use generate for several")
        if self.tokenizer is None:
            raise InputError("stream yields text and needs a tokenizer: construct the decoder with one")
        taker = scheduler or Scheduler(self)
        return TextStream(taker.add(request), taker, alone=scheduler is None)

    @spelled_out
    def open(
        self, prompt: Prompt = None, *, num_return_sequences: int | None = None, **options: Unpack[Options]
    ) -> Run:
        """Check everything and prepare a run; no model runs before it is iterated.

        Args:
            prompt: as `generate`.
            num_return_sequences: as `generate`.
            **options: see `Options`.

        Raises:
            InputError, SamplingError: what is wrong, why, and what to do.
        """
        return Run(*self._prepared(prompt, {**options, "num_return_sequences": num_return_sequences}))

    def scheduler(self, max_rows: int = MAX_ROWS, store: PrefixStore | None = None) -> Scheduler:
        """Return a scheduler for requests of `prepare` that come and go at any time, from any thread.

        Args:
            max_rows: requests decoded at a time.
            store: where what was read is kept, for later requests: see `Scheduler`.

        Raises:
            InputError: not a positive whole number.
        """
        return Scheduler(self, checked_count("max_rows", max_rows, 1), store=store)

    @spelled_out
    def prepare(
        self,
        prompt: Prompt = None,
        *,
        num_return_sequences: int | None = None,
        keep_stop_string: bool = True,
        stopping: Callable[..., Stopping] = Stopping,
        **options: Unpack[Options],
    ) -> Any:
        """Check everything and make the request of a prompt, for a `Scheduler`; no model runs.

        A tokenizer's output may be given as it is (``prepare(inputs)``) or by name (``prepare(**inputs)``).  Padding
        is removed at both ends.  Token types and positions are accepted if they change nothing.

        Args:
            prompt: as `generate`.
            num_return_sequences: as `generate`.
            keep_stop_string: as `generate`.
            stopping: makes what ends a row: `Stopping`, or a subclass.
            **options: see `Options`.

        Returns:
            Request for one prompt, list[Request] for a batch or several texts, as `generate`.

        Raises:
            InputError, SamplingError: what is wrong, why, and what to do.
        """
        asked = {**options, "num_return_sequences": num_return_sequences}
        requests, single = self._prepared(prompt, asked, keep_stop_string, stopping=stopping)
        return requests[0] if single else requests

    def _prepared(
        self,
        prompt: Prompt,
        options: Mapping[str, object],
        keep_stop_string: bool = True,
        first: int = 0,
        stopping: Callable[..., Stopping] = Stopping,
        short: bool = False,
    ) -> tuple[list[Request], bool]:
        """Return the requests of a call, numbered from `first` on, and whether it has one prompt, for one text.

        Least lengths are not compared with those that stand in for others, which are short.
        """
        ours = cast(Options, {name: value for name, value in options.items() if name in OURS})
        config = {name: value for name, value in options.items() if name not in OURS}
        check_names(config, _options("open"), {name: _options(method) for method, name in METHODS.items()})
        prompts = self.read(prompt, ours.get("raw", False), part(ours, ChatOptions), **part(ours, Inputs))
        given: dict[str, Any] = {name: ours.get(name) for name in ("generation_config", *FUNCTIONS)}
        settings = [
            resolve(self.target.model.generation_config, vocab_size=self.target.vocab_size, **given, **row_options)
            for row_options in by_row(config, len(prompts.rows))
        ]
        if (grammar := asked(part(ours, GrammarOptions))) is not None:
            settings = [setting.of_grammar(self.guidance.compiled(grammar)) for setting in settings]
        settings *= len(prompts.rows) // len(settings)
        for setting, row in () if short else zip(settings, prompts.rows, strict=True):
            setting.check_least(len(row))
        budgets = [setting.budget(len(row)) for setting, row in zip(settings, prompts.rows, strict=True)]
        self.check_lengths(prompts.rows, budgets, trees=1 if grammar is None else 2)
        sequences, seed = settings[0].sequences, ours.get("seed")
        if seed is None and not any(setting.do_sample for setting in settings):
            seed = 0  # torch's generator stays as it is where no token is drawn
        requests = make_requests(
            self,
            prompts.rows,
            settings,
            row_seeds(seed, len(prompts.rows), self.target.ranks, sequences),
            sequences=sequences,
            notes=prompts.notes,
            logprobs=checked_logprobs(ours.get("logprobs", False)),
            predicted=self._predicted(ours.get("prediction")),
            keep_stop_string=checked_flag("keep_stop_string", keep_stop_string),
            first=first,
            stopping=stopping,
            salt=checked_salt(ours.get("cache_salt")),
        )
        sized(self.policy, [request.row for request in requests])  # or it raises
        return requests, prompts.single and sequences == 1

    def _predicted(self, prediction: str | Sequence[int] | None) -> Sequence[int]:
        """Return the token ids of what a text may repeat."""
        ids = plain(prediction)
        if isinstance(ids, str):
            return tokenized(ids, self.tokenizer, add_special_tokens=False)
        if ids is None:
            return ()
        if not isinstance(ids, list | tuple) or not all(isinstance(each, int) for each in ids):
            advice = "give one text, or its token ids, for all prompts"
            raise InputError(f"prediction={prediction!r:.60} is neither text nor token ids: {advice}")
        check_ids([ids], self.target.vocab_size)
        return ids

    def save_drafts(self, folder: str | os.PathLike[str]) -> None:
        """Write what heads have learnt online, as a folder that `HeadDraft.load` and ``--draft`` read.

        Several heads go into folders 1, 2, ... in it.

        Raises:
            InputError: no draft learns, or the folder holds something else or cannot be written.
            SpecinferError: the disk is full.
        """
        save_heads(self.drafts, folder)

    @overload
    def score(self, prompt: OnePrompt, continuation: str | Sequence[int], **options: Unpack[ScoreOptions]) -> Score: ...

    @overload
    def score(
        self, prompt: Prompt, continuation: list[str] | list[list[int]], **options: Unpack[ScoreOptions]
    ) -> list[Score]: ...

    @overload
    def score(self, prompt: Prompt, continuation: object, **options: Unpack[ScoreOptions]) -> Any: ...

    @spelled_out
    def score(
        self,
        prompt: Prompt,
        continuation: object,
        *,
        raw: bool = False,
        max_rows: int = MAX_ROWS,
        top_logprobs: int = 0,
        **chat: Unpack[ChatOptions],
    ) -> Any:
        """Return how likely a continuation is under the target's own distribution, without processors.

        Of a batch, a few prompts of similar length are read at a time.  Continuations of one prompt are a token tree:
        the prompt is read once, and one pass scores all of them.

        Args:
            prompt: as `generate`.
            continuation: text or token ids; for a batch of prompts a list, one for each.  Text is encoded alone,
                without special tokens: pass ids if a token begins in the prompt and ends in the continuation.
            raw: feed strings without the chat template.
            max_rows: prompts that are read at a time.
            top_logprobs: how many of the likeliest tokens are kept beside each one: `Score.top_logprobs`.
            **chat: see `ChatOptions`.

        Returns:
            Score for one prompt, list[Score] for a batch.

        Raises:
            InputError: it cannot be scored, or does not fit the target's context.
            UnsupportedModel: the target's passes give other logits for the same text.
            NumericalError: the target's logits are not numbers.
        """
        rows, prompts = checked_count("max_rows", max_rows, 1), self.read(prompt, raw, _chat(chat))
        top = checked_count("top_logprobs", top_logprobs, 0)
        wanted = continuations(prompts, continuation, self.tokenizer, self.target.vocab_size)
        self.check_lengths(prompts.rows, [len(tokens) - 1 for tokens in wanted])  # no pass reads the last token
        self.supported(self.policy, [])
        scores = score(self.target, prompts.rows, wanted, rows, top)
        return scores[0] if prompts.single else scores

    def read(
        self,
        prompt: Prompt = None,
        raw: bool = False,
        chat: ChatOptions = ChatOptions(),  # noqa: B008
        **inputs: Unpack[Inputs],
    ) -> Prompts:
        """Turn a caller's prompts into rows of the target's token ids, with padding separate.

        Args:
            prompt: as `generate`.
            raw: see `Options`.
            chat: how messages become a prompt.
            **inputs: see `Inputs`.

        Raises:
            InputError: no prompt or two, a bad one, or something beside it that would change the text.
        """
        beside = {name: value for name, value in inputs.items() if value is not None}
        input_ids = beside.pop("input_ids", None)
        if isinstance(prompt, Mapping) and "input_ids" in prompt and not beside:
            beside = dict(prompt)
            prompt = beside.pop("input_ids")
        if (prompt is None) == (input_ids is None) or isinstance(input_ids, str):
            raise InputError("give one prompt as the first argument, or token ids as input_ids=")
        pad = getattr(self.tokenizer, "pad_token_id", None)
        if pad is None:
            pad = plain(self.target.model.generation_config.pad_token_id)
        given, mask = prompt if input_ids is None else input_ids, beside.pop("attention_mask", None)
        prompts = encode(given, self.tokenizer, checked_flag("raw", raw), mask, pad, chat)
        check_ids(prompts.rows, self.target.vocab_size)
        if prompts.single:
            beside = {name: [value] for name, value in beside.items() if value is not None}
        check_beside(beside, prompts.padded, self.target)
        return prompts

    @property
    def context(self) -> float:
        """How many tokens a prompt and its text may have together, in any call; infinite if the target has no limit."""
        return self._context(2)

    def _context(self, trees: int) -> float:
        """Return the same where a step's tree may have as many nodes as several trees of the policy."""
        limit = self.target.position_limit() or inf
        return limit if self.target.takes_positions else limit - trees * self.policy.max_nodes  # these count padding

    def check_lengths(self, rows: Sequence[Sequence[int]], budgets: Sequence[int], trees: int = 1) -> None:
        """Raise `InputError` if a prompt and its new tokens (the budget) do not fit the target's context.

        Args:
            rows, budgets: of each prompt.
            trees: how many trees of the policy a step's tree may be as large as.
        """
        limit = self._context(trees)
        for index, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            if len(row) + budget > limit:
                named = f" ({self.target.context.setting})" if self.target.context.setting else ""
                sizes = f"{len(row)} prompt tokens + {budget} new ones exceed the target's context of {limit}{named}"
                less = f" or ask for at most {limit - len(row)} new tokens" if limit > len(row) else ""
                raise InputError(f"row {index}: {sizes}: shorten the prompt{less}")

    def _ready(self, drafts: list[object]) -> list[Draft]:
        """Return drafts in the order given, with "auto" and "bundled" replaced by what they mean."""
        found: list[object] = []
        for draft in drafts:
            heads: Iterator[object] = self._bundled() if draft in ("auto", "bundled") else iter([draft])
            first = [*islice(heads, 1)]
            if draft == "bundled" and not first:
                raise InputError("draft 'bundled': no heads for this target come with the package, name another draft")
            found += [*first, *(self._free_drafts(bool(first)) if draft == "auto" else heads)]
        if len(found) > MOST_DRAFTS:
            raise InputError(f"{len(found)} drafts are too many: give {MOST_DRAFTS} at most")
        return [_as_draft(draft) for draft in found]

    def _bundled(self) -> Iterator[HeadDraft]:
        return iter(()) if self.target.ranks.stages > 1 else bundled_drafts(self.target.model, self.tokenizer)

    def _free_drafts(self, head: bool) -> list[str]:
        """Return the drafts without weights that "auto" means, beside a head if there is one."""
        if check_model(self.target.model).support is Support.CHAIN_ONLY:  # two chains branch
            return ["suffix"] if self.memory else ["recycling"]
        return ["suffix" if self.memory else "ngram"] if head else ["recycling", "suffix"]

    def _attached(self, draft: Draft) -> Draft:
        """Return a draft for this decoder alone, attached to its target: the caller's may serve several decoders."""
        if not isinstance(draft, ModelDraft) or type(draft).attach is not Draft.attach:
            return draft.attach(self.target, self.tokenizer)
        if draft.tokenizer is None or self.tokenizer is None:
            check_sizes(self.target, draft)
            self.notes.append(f"draft {draft.name}: its tokenizer was not compared with the target's; give both")
        elif draft.tokens == "text" and self.tokenizer.get_vocab() != draft.tokenizer.get_vocab():
            return ThroughTextDraft(draft, self.target, self.tokenizer)
        else:
            loading.same_tokens(self.tokenizer, draft.tokenizer)
        draft = copy(draft)
        draft.model = TreeModel(draft.model.model)
        return draft

    def supported(self, policy: Policy, notes: list[str]) -> Policy:
        """Check all models as they are now; return a chain if one cannot branch, and add a note.

        Raises:
            UnsupportedModel: a model cannot score even chains, or these drafts or this policy need a tree.
        """
        for model in self.language_models:
            check = check_model(model.model)
            if check.support is Support.UNSUPPORTED:
                raise UnsupportedModel(f"{check.model} cannot score token trees: {check.reason}")
            if check.support is not Support.CHAIN_ONLY:
                continue
            limit = f"{check.model} can score chains only ({check.reason})"
            if policy.prescribes:
                raise UnsupportedModel(f"{limit}: leave out penalty_alpha, whose candidates are branches")
            if len(self.drafts) > 1 or (policy.branches and policy.kind is not Kind.RANKED):
                raise UnsupportedModel(f"{limit}: use one draft and tree=Chain(k)")
            if policy.branches:
                policy = Chain(min(policy.max_depth, CHAIN) if policy.adapts else policy.max_depth)
                notes.append(f"tree={policy}: {limit}")
        return policy


@cache
def _options(method: str) -> list[str]:
    """Return the names of the options of one of the decoder's methods."""
    parameters = inspect.signature(getattr(SpeculativeDecoder, method)).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _chat(given: Mapping[str, object]) -> ChatOptions:
    """Return how messages become a prompt; raise `InputError` for an option of something else."""
    for name in given.keys() - {*names(ChatOptions)}:
        raise InputError(f"unknown option {name}: {did_you_mean(name, names(ChatOptions), 'leave it out')}")
    return part(given, ChatOptions)


def _as_list(drafts: object) -> list[object]:
    """Return drafts as a list; one may stand alone."""
    return list(drafts) if isinstance(drafts, Sequence) and not isinstance(drafts, str | bytes) else [drafts]


def _as_policy(tree: Any) -> Policy:
    policy = Chain(0) if tree is None else Auto() if tree == "auto" else tree
    if not hasattr(policy, "grow") or isinstance(policy, type):
        advice = 'use "auto", BestFirst(...), Expansion(...), Chain(...), Sampled(...) or None.'
        meant = f"{did_you_mean(tree, TREES, advice)} For example, tree=BestFirst(16, 8)"
        raise InputError(f"tree={tree!r:.60} is not a growth policy: {meant}")
    return policy


def _check_arguments(model: object, tokenizer: object, gate: object) -> None:
    """Raise `ModelError` or `InputError` for arguments of another kind."""
    if _is_name(model):
        raise ModelError(f"{str(model)!r:.60} is a name: use SpeculativeDecoder.from_pretrained, or load the model")
    if tokenizer is not None and (isinstance(tokenizer, bytes | type) or not hasattr(tokenizer, "decode")):
        raise InputError(f"tokenizer={tokenizer!r:.60} cannot decode: give the target's, or None for ids only")
    if gate is not None and (isinstance(gate, bool) or not isinstance(gate, int | float) or not 0 <= gate <= 1):
        raise InputError(f"confidence_gate={gate!r} is not a probability: give a number from 0 to 1, or None")


def _as_draft(draft: Any) -> Draft:
    if isinstance(draft, str) and draft in NAMED:
        return NAMED[draft]()
    if _is_name(draft):
        advice = did_you_mean(draft, WORDS, "use SpeculativeDecoder.from_pretrained, or load the model")
        raise InputError(f"draft {str(draft)!r:.60} is a name: {advice}")
    if isinstance(draft, Draft):
        return draft
    if not hasattr(draft, "config"):
        raise InputError(f"{draft!r:.60} is not a draft: give a model, a name, a specinfer.Draft, or () for none")
    return ModelDraft(draft)


def _is_name(draft: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(draft, str | os.PathLike)


def load_draft(name: str, dtype: str | torch.dtype, device: str | torch.device, quantize: str | None = None) -> Draft:
    """Load a draft: a head trained here, a published head, or else a language model.

    A language model is rounded as ``quantize`` says, or else to 4 bits where nothing is said of its numbers and that is
    faster: a draft only proposes.  One that cannot be rounded stays whole.  Products with packed weights round states
    to 8 bits, unless a dtype is given.

    Raises:
        ModelError: it cannot be loaded.
    """
    config = draft_config(name) if loading.gguf_file(name) is None else {}
    if config.get("model_type") == MODEL_TYPE:
        return HeadDraft.load(Path(os.path.expanduser(name)))
    if may_be_head(config) and (head := load_published(name)) is not None:
        return head
    try:
        loaded = _load_small(name, dtype, device, quantize)
    except ModelError as error:
        advice = did_you_mean(name, WORDS, f"words for drafts are {', '.join(WORDS)}")
        raise ModelError(str(error) if "/" in name else f"{error}; {advice}") from error
    if str(dtype) == "auto":
        round_states(loaded.model)
    return ModelDraft(loaded.model, loaded.tokenizer, loaded.name)


def _load_small(
    name: str, dtype: str | torch.dtype, device: str | torch.device, quantize: str | None
) -> loading.Loaded:
    """Load a language model that drafts, rounded where that is asked for, or pays and can be done."""
    if quantize is None and str(dtype) == "auto" and loading.rounding_pays(device):
        with suppress(UnsupportedModel):
            return loading.load(name, dtype, device, quantize=DRAFT_FORM)
    return loading.load(name, dtype, device, quantize=quantize)


def check_sizes(target: TreeModel, draft: ModelDraft) -> None:
    """Raise `TokenizerMismatch` if a draft's vocabulary is not the target's by its size alone: padding is small."""
    sizes = draft.model.vocab_size, target.vocab_size
    if abs(sizes[0] - sizes[1]) > PADDING:
        differ = f"draft {draft.name} knows {sizes[0]} tokens, the target {sizes[1]}"
        advice = "give tokenizer= of the target, and ModelDraft(model, tokenizer) of the draft"
        raise TokenizerMismatch(f"{differ}, and nothing says which are the same: {advice}")


def row_seeds(seed: int | Sequence[int] | None, rows: int, ranks: Ranks = ALONE, sequences: int = 1) -> list[int]:
    """Return one seed per row: the same for all, one each, or drawn from torch's global generator (of the first rank).

    Args:
        seed, rows, ranks: of the prompts.
        sequences: of each prompt.  Their seeds count up from the prompt's, one after the other.

    Raises:
        InputError: not a whole number of 64 bits, or not one per row.
    """
    if seed is None:
        return ranks.first([int(draw) for draw in torch.randint(2**62, (rows * sequences,), device="cpu")])
    value = plain(seed)
    given = list(value) if isinstance(value, list | tuple | range) else [value] * rows
    if len(given) != rows or any(isinstance(s, bool) or not isinstance(s, int) for s in given):
        raise InputError(f"seed={seed!r:.60}: give one whole number, or one per prompt ({rows})")
    if not all(-(2**63) <= s < 2**64 for s in given):
        raise InputError(f"seed={seed!r:.60}: a seed has 64 bits, so give one from -2**63 to 2**64 - 1")
    counted = (first + number for first in given for number in range(sequences))
    return [each if each < 2**64 else each - 2**64 for each in counted]

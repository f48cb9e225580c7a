"""What people who know transformers try first: it works, or is refused with what to do instead."""

import asyncio
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import torch
from conftest import EOS_TEXT, byte_tokenizer, like, plain, tiny_llama
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    TextStreamer,
    set_seed,
)

import specinfer
from specinfer import BestFirst, ModelDraft, SpeculativeDecoder
from specinfer.errors import SpecinferError

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 20}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


class Kit(NamedTuple):
    """What a user has."""

    folder: str  # of a model and a tokenizer
    model: Any
    draft: Any
    tokenizer: Any
    decoder: SpeculativeDecoder

    def load(self, **options: Any) -> SpeculativeDecoder:
        """Load the folder."""
        return SpeculativeDecoder.from_pretrained(self.folder, **{"drafts": "ngram", **options})

    def generate(self, prompt: Any = "abc", **options: Any) -> Any:
        """Generate a little."""
        return self.decoder.generate(prompt, **{"max_new_tokens": 6, **options})

    def inputs(self, *texts: str) -> Any:
        """Return what the tokenizer makes of texts."""
        return self.tokenizer(list(texts), return_tensors="pt", padding=True)

    def plain(self, *texts: str) -> list[list[int]]:
        """Return the ids that transformers writes after texts."""
        return [plain(self.model, self.tokenizer(text)["input_ids"], 6) for text in texts]


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder, model = tmp_path_factory.mktemp("tiny"), tiny_llama(eos_token_id=EOS_TEXT, pad_token_id=257)
    tokenizer = byte_tokenizer(padding_side="left", chat_template=TEMPLATE)
    tiny_llama().float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draft = like(model)
    return Kit(str(folder), model, draft, tokenizer, SpeculativeDecoder(model, tokenizer, [draft], BestFirst(6, 3)))


def pieces(kit: Kit) -> list[str]:
    async def read() -> list[str]:
        return [piece async for piece in kit.decoder.stream("abc", max_new_tokens=6)]

    return asyncio.run(read())


def iterated(kit: Kit) -> str:
    streamer = TextIteratorStreamer(kit.tokenizer, skip_prompt=True)
    thread = Thread(target=kit.generate, kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


def seeded(kit: Kit) -> list[int]:
    set_seed(3)
    return kit.generate(**SAMPLED).token_ids


def first(kit: Kit) -> int:
    """Return the token that the model writes after token 1."""
    return plain(kit.model, [1], 1)[0]


def saved(kit: Kit) -> Any:
    return pickle.loads(pickle.dumps(kit.generate()))


def inside(kit: Kit, **options: Any) -> list[int]:
    """Return the new ids of transformers' own call with our loop."""
    ids = torch.tensor([[5, 6, 7]])
    found = kit.model.generate(ids, custom_generate=specinfer.custom_generate, max_new_tokens=6, **options)
    return found[0, 3:].tolist()


# Each gives what stands beside it.
WORKS: dict[str, tuple[Callable[[Kit], Any], Callable[[Kit], Any]]] = {
    "a folder": (lambda kit: kit.load().target.name, lambda _: "LlamaForCausalLM"),
    "a path": (lambda kit: SpeculativeDecoder.from_pretrained(Path(kit.folder), ()).drafts, lambda _: []),
    "a dtype of torch": (lambda kit: kit.load(dtype=torch.float16).target.dtype, lambda _: torch.float16),
    "its name": (lambda kit: kit.load(dtype="float64").target.dtype, lambda _: torch.float64),
    "its name in torch": (lambda kit: kit.load(dtype="torch.float32").target.dtype, lambda _: torch.float32),
    "a short name": (lambda kit: kit.load(dtype="half").target.dtype, lambda _: torch.float16),
    "a device of torch": (lambda kit: kit.load(device=torch.device("cpu")).target.device.type, lambda _: "cpu"),
    "device_map auto": (lambda kit: kit.load(device_map="auto").target.device.type, lambda _: "cpu"),
    "device_map cpu": (lambda kit: kit.load(device_map="cpu").target.device.type, lambda _: "cpu"),
    "attn_implementation": (
        lambda kit: kit.load(attn_implementation="eager").target.model.config._attn_implementation,
        lambda _: "eager",
    ),
    "revision and token": (lambda kit: kit.load(revision="main", token=False).target.layers, lambda _: 2),
    "a draft by name": (lambda kit: kit.load(drafts=kit.folder).drafts[0].name, lambda kit: Path(kit.folder).name),
    "models": (
        lambda kit: SpeculativeDecoder(kit.model, kit.tokenizer, ModelDraft(kit.draft, kit.tokenizer)).notes,
        lambda _: [],
    ),
    "text": (lambda kit: kit.generate("abc", raw=True).token_ids, lambda kit: kit.plain("abc")[0]),
    "a list of texts": (
        lambda kit: [result.text for result in kit.generate(["a", "bcd"])],
        lambda kit: [kit.generate("a").text, kit.generate("bcd").text],
    ),
    "chat messages": (
        lambda kit: kit.tokenizer.decode(kit.generate(MESSAGES).prompt_ids),
        lambda _: "system: Be brief.\nuser: Why?\n",
    ),
    "a tokenizer's output by name": (
        lambda kit: [result.token_ids for result in kit.decoder.generate(**kit.inputs("a", "bcd"), max_new_tokens=6)],
        lambda kit: kit.plain("a", "bcd"),
    ),
    "a tokenizer's output": (
        lambda kit: [result.token_ids for result in kit.generate(kit.inputs("a", "bcd"))],
        lambda kit: kit.plain("a", "bcd"),
    ),
    "a tensor of ids": (
        lambda kit: kit.generate(kit.inputs("abc").input_ids)[0].token_ids,
        lambda kit: kit.plain("abc")[0],
    ),
    "a template's output": (
        lambda kit: kit.generate(kit.tokenizer.apply_chat_template(MESSAGES, return_dict=True)).token_ids,
        lambda kit: kit.generate(MESSAGES).token_ids,
    ),
    "sampling": (lambda kit: kit.generate(seed=1, **SAMPLED).seed, lambda _: 1),
    "set_seed": (seeded, seeded),
    "num_return_sequences": (lambda kit: len(kit.generate(num_return_sequences=3, **SAMPLED)), lambda _: 3),
    "a GenerationConfig": (
        lambda kit: len(kit.decoder.generate("a", generation_config=GenerationConfig(max_new_tokens=4)).token_ids),
        lambda _: 4,
    ),
    "a config as a dict": (
        lambda kit: len(kit.decoder.generate("a", generation_config={"max_new_tokens": 4}).token_ids),
        lambda _: 4,
    ),
    "max_length": (lambda kit: len(kit.decoder.generate([1, 2, 3], max_length=8).token_ids), lambda _: 5),
    "a TextStreamer": (
        lambda kit: kit.generate(streamer=TextStreamer(kit.tokenizer)).finish_reason,
        lambda _: "length",
    ),
    "a TextIteratorStreamer": (iterated, lambda kit: kit.generate().text),
    "a stream": (lambda kit: "".join(kit.decoder.stream("abc", max_new_tokens=6)), lambda kit: kit.generate().text),
    "async for": (lambda kit: "".join(pieces(kit)), lambda kit: kit.generate().text),
    "stop_strings": (
        lambda kit: kit.generate([1], stop_strings=[kit.generate([1]).text[:1]]).finish_reason,
        lambda _: "stop",
    ),
    "eos_token_id": (
        lambda kit: kit.generate([1], eos_token_id=[255, first(kit)]).finish_reason,
        lambda _: "eos",
    ),
    "stopping_criteria": (
        lambda kit: len(kit.generate([1], stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(3)])).token_ids),
        lambda _: 2,
    ),
    "logits_processor": (
        lambda kit: (
            kit.generate(
                [1, 2], logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
            ).token_ids
        ),
        lambda kit: plain(kit.model, [1, 2], 6, repetition_penalty=1.5),
    ),
    "repetition_penalty": (
        lambda kit: kit.generate([1, 2], repetition_penalty=1.5).token_ids,
        lambda kit: plain(kit.model, [1, 2], 6, repetition_penalty=1.5),
    ),
    "bad_words_ids": (
        lambda kit: first(kit) in kit.generate([1], bad_words_ids=[[first(kit)]]).token_ids,
        lambda _: False,
    ),
    "contrastive search": (lambda kit: len(kit.generate(penalty_alpha=0.6, top_k=4).token_ids), lambda _: 6),
    "decode": (lambda kit: kit.tokenizer.decode(kit.generate().token_ids), lambda kit: kit.generate().text),
    "batch_decode": (
        lambda kit: kit.tokenizer.batch_decode(kit.generate("abc", raw=True).sequences),
        lambda kit: [f"abc{kit.generate('abc', raw=True).text}"],
    ),
    "log-probabilities": (lambda kit: len(kit.generate(logprobs=True).logprobs), lambda _: 6),
    "no_grad": (lambda kit: torch.no_grad()(kit.generate)().token_ids, lambda kit: kit.generate().token_ids),
    "print": (lambda kit: str(kit.generate()), lambda kit: kit.generate().text),
    "pickle": (lambda kit: saved(kit).token_ids, lambda kit: kit.generate().token_ids),
    "model.generate": (inside, lambda kit: plain(kit.model, [5, 6, 7], 6)),
    "model.generate with an assistant": (
        lambda kit: inside(kit, assistant_model=kit.draft),
        lambda kit: plain(kit.model, [5, 6, 7], 6),
    ),
}


# Each says what to do.
REFUSED: dict[str, tuple[Callable[[Kit], Any], str]] = {
    "max_tokens": (lambda kit: kit.generate(max_tokens=5), "did you mean max_new_tokens?"),
    "max_new_tokens as text": (lambda kit: kit.generate(max_new_tokens="5"), "must be a whole number"),
    "stop": (lambda kit: kit.generate(stop="."), "did you mean stop_strings?"),
    "n": (lambda kit: kit.generate(n=2), "did you mean num_return_sequences?"),
    "greedy sequences": (lambda kit: kit.generate(num_return_sequences=2), "give a temperature above 0"),
    "temperature 0, sampled": (lambda kit: kit.generate(temperature=0, do_sample=True), "leave one of them out"),
    "top_p, greedy": (lambda kit: kit.generate(do_sample=False, top_p=0.5), "leave it out"),
    "beams": (lambda kit: kit.generate(num_beams=4), "tree verification follows one"),
    "output_scores": (lambda kit: kit.generate(output_scores=True), "give logprobs=True"),
    "output_hidden_states": (lambda kit: kit.generate(output_hidden_states=True), "do not return them"),
    "a static cache": (lambda kit: kit.generate(cache_implementation="static"), "brings its own tree cache"),
    "no cache": (lambda kit: kit.generate(use_cache=False), "verified against a cache"),
    "an old cache": (lambda kit: kit.generate(past_key_values=()), "token ids alone"),
    "embeddings": (lambda kit: kit.generate(inputs_embeds=torch.zeros(1, 2, 32)), "token ids alone"),
    "the tokenizer": (lambda kit: kit.generate(tokenizer=kit.tokenizer), "the decoder has one"),
    "an assistant": (
        lambda kit: kit.generate(assistant_model=kit.draft),
        "did you mean drafts, of SpeculativeDecoder?",
    ),
    "prompt look-up": (lambda kit: kit.generate(prompt_lookup_num_tokens=3), 'use drafts=["ngram"]'),
    "assisted tokens": (lambda kit: kit.generate(num_assistant_tokens=5), "give tree=Chain(20), for example"),
    "guidance": (lambda kit: kit.generate(guidance_scale=2.0), "a second, unconditional pass"),
    "constraints": (lambda kit: kit.generate(prefix_allowed_tokens_fn=lambda *_: [1]), "PrefixConstrainedLogits"),
    "padding at random": (lambda kit: kit.generate([[257, 257, 1], [1, 2, 3]]), "give attention_mask="),
    "a streamer for many": (lambda kit: kit.generate([[1], [2]], streamer=TextStreamer(kit.tokenizer)), "one by one"),
    "a name": (lambda kit: SpeculativeDecoder("gpt2"), "use SpeculativeDecoder.from_pretrained"),
    "torch_dtype": (lambda kit: kit.load(torch_dtype=torch.float32), "give dtype"),
    "fp16": (lambda kit: kit.load(dtype="fp16"), "did you mean float16?"),
    "gpu": (lambda kit: kit.load(device="gpu"), "did you mean cuda?"),
    "cuda:99": (lambda kit: kit.load(device="cuda:99"), "try cpu"),
    "load_in_4bit": (lambda kit: kit.load(load_in_4bit=True), "did you mean quantize?"),
    "trust_remote_code": (lambda kit: kit.load(trust_remote_code=True), "no code that comes with a model runs"),
    "assistant_model on loading": (lambda kit: kit.load(assistant_model="x"), "did you mean drafts?"),
    "options of generate on loading": (lambda kit: kit.load(max_new_tokens=5), "give it to `generate`"),
    "a misspelt draft": (lambda kit: kit.load(drafts="ngrams"), "did you mean ngram?"),
    "a misspelt tree": (
        lambda kit: kit.load(tree="best-first"),
        "did you mean BestFirst? For example, tree=BestFirst(16, 8)",
    ),
    "no draft": (lambda kit: kit.load(drafts=None), "() for none"),
    "an encoder": (
        lambda kit: SpeculativeDecoder(BertLMHeadModel(BertConfig(vocab_size=264, **SMALL)).eval(), drafts="ngram"),
        "no causal LM, so choose a decoder-only model",
    ),
    "an encoder-decoder": (
        lambda kit: SpeculativeDecoder(T5ForConditionalGeneration(T5Config(vocab_size=264, d_model=32, num_layers=1))),
        "use a decoder-only model",
    ),
    "another vocabulary": (
        lambda kit: SpeculativeDecoder(kit.model, drafts=[like(kit.model, vocab=900)]),
        "give tokenizer= of the target",
    ),
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def test_there_are_forty() -> None:
    assert len(WORKS) + len(REFUSED) >= 40


@pytest.mark.parametrize("name", WORKS)
def test_it_works(kit: Kit, name: str) -> None:
    usage, expected = WORKS[name]
    assert usage(kit) == expected(kit)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_advice(kit: Kit, name: str) -> None:
    usage, advice = REFUSED[name]
    with pytest.raises(SpecinferError, match=re.escape(advice)):
        usage(kit)

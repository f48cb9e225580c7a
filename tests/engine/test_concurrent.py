"""One decoder used by several at once, models used by several decoders, models that change between calls."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import PROMPTS, byte_tokenizer, like, tiny_llama
from transformers import TextStreamer

from specinfer import BestFirst, Chain, SpeculativeDecoder
from specinfer.errors import UnsupportedModel

NEW = 12
OPTIONS = [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"temperature": 0, "repetition_penalty": 1.2}]
TREES = ["auto", BestFirst(8, 4)]


def ids(decoder, prompt, **options):
    return decoder.generate(prompt, **{"max_new_tokens": NEW, "temperature": 0, **options}).token_ids


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(params=TREES, ids=str)
def decoder(request, target):
    return SpeculativeDecoder(target, byte_tokenizer(), ["ngram", like(target)], request.param)


@pytest.fixture(scope="module")
def jobs(target):
    """Prompts with options, and the ids of no speculation."""
    alone = SpeculativeDecoder(target, None, (), None)
    every = [(prompt, options) for options in OPTIONS for prompt in PROMPTS]
    return every, [ids(alone, prompt, **options) for prompt, options in every]


def test_one_decoder_in_several_threads(decoder, jobs):
    every, wanted = jobs
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda job: ids(decoder, job[0], **job[1]), every * 2))
    assert found == wanted * 2


def test_one_decoder_in_threads_of_an_event_loop(decoder, jobs):
    every, wanted = jobs

    async def three():
        return await asyncio.gather(*(asyncio.to_thread(ids, decoder, p, **o) for p, o in every[:3]))

    assert asyncio.run(three()) == wanted[:3]


def test_batches_and_single_prompts_at_once(decoder, jobs):
    every, wanted = jobs
    with ThreadPoolExecutor(4) as threads:
        batches = [threads.submit(decoder.generate, PROMPTS, max_new_tokens=NEW, temperature=0) for _ in range(3)]
        singles = list(threads.map(lambda job: ids(decoder, job[0], **job[1]), every))
    assert singles == wanted
    for batch in batches:
        assert [row.token_ids for row in batch.result()] == wanted[: len(PROMPTS)]


class Callbacks:
    """Whatever transformers lets a caller do while a text is decoded: each generates another text."""

    def __init__(self, decoder, prompt):
        self.decoder, self.prompt, self.found = decoder, prompt, []

    def again(self):
        """Generate, three times at most."""
        if len(self.found) < 3:
            self.found.append(ids(self.decoder, self.prompt))

    def processor(self, input_ids, scores):
        """Change nothing."""
        self.again()
        return scores

    def criterion(self, input_ids, scores, **_):
        """Go on."""
        self.again()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value):
        """Show nothing."""
        self.again()

    def end(self):
        """Show nothing."""
        self.again()


@pytest.mark.parametrize("way", ["logits_processor", "stopping_criteria", "streamer"])
def test_a_callback_may_generate_with_the_same_decoder(decoder, jobs, way):
    _, wanted = jobs
    callbacks = Callbacks(decoder, PROMPTS[1])
    given = {"logits_processor": [callbacks.processor], "stopping_criteria": [callbacks.criterion]}
    assert ids(decoder, PROMPTS[0], **{way: given.get(way, callbacks)}) == wanted[0]
    assert callbacks.found == [wanted[1]] * 3


def test_streams_of_one_decoder_advanced_in_turn(decoder, jobs):
    every, wanted = jobs
    streams = [decoder.stream(prompt, max_new_tokens=NEW, **options) for prompt, options in every]
    waiting = list(streams)
    while waiting:
        waiting = [stream for stream in waiting if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == wanted


def test_a_stream_while_other_threads_generate(decoder, jobs):
    every, wanted = jobs
    with ThreadPoolExecutor(3) as threads:
        rest = threads.map(lambda job: ids(decoder, job[0], **job[1]), every)
        streams = [decoder.stream(prompt, max_new_tokens=NEW, **options) for prompt, options in every]
        for stream in streams:
            list(stream)
        assert list(rest) == wanted
    assert [stream.result.token_ids for stream in streams] == wanted


def test_two_decoders_on_one_model_at_once(target, jobs):
    every, wanted = jobs
    made = [SpeculativeDecoder(target, None, ["ngram", target], tree) for tree in (*TREES, Chain(3), None)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda own: [ids(own, p, **o) for p, o in every], made))
    assert found == [wanted] * 4


@pytest.mark.parametrize("parts", [(), ("model.layers.1",)], ids=["all", "a layer"])
def test_a_model_in_train_mode_from_several_threads(parts):
    """Dropout is off while passes run, whoever else runs some, and on again afterwards where it was on."""
    model = tiny_llama(attention_dropout=0.5)
    wanted = [ids(SpeculativeDecoder(model, None, (), None), prompt) for prompt in PROMPTS]
    for module in map(model.get_submodule, parts or [""]):
        module.train()
    flags = [module.training for module in model.modules()]
    decoder = SpeculativeDecoder(model, None, ["ngram"], BestFirst(8, 4))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda prompt: ids(decoder, prompt), PROMPTS * 6))
    assert found == wanted * 6
    assert [module.training for module in model.modules()] == flags


def test_a_streamer_of_transformers_sees_whole_texts_in_every_thread(decoder, jobs, capsys):
    _, wanted = jobs
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda p: ids(decoder, p, streamer=TextStreamer(decoder.tokenizer)), PROMPTS[:2])
        assert list(found) == wanted[:2]


# ---- models that change between calls ----


def mix(module, given, output):
    """A forward hook through which positions disturb each other."""
    return output - output.mean(1, keepdim=True)


@pytest.mark.parametrize("tree", ["auto", BestFirst(8, 4), None], ids=str)
def test_a_hook_that_came_after_construction_is_seen_at_the_next_call(tree):
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, byte_tokenizer(), ["ngram"], tree)
    wanted = ids(decoder, PROMPTS[0])
    hook = model.model.layers[0].register_forward_hook(mix)
    for call in (ids, lambda *given: list(decoder.stream(PROMPTS[0], max_new_tokens=4))):
        with pytest.raises(UnsupportedModel, match="later tokens or other rows"):
            call(decoder, PROMPTS[0])
    hook.remove()
    assert ids(decoder, PROMPTS[0]) == wanted


def test_a_harmless_hook_is_obeyed(target):
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, None, ["ngram"])
    model.model.norm.register_forward_hook(lambda module, given, output: 2 * output.roll(1, -1))
    found = ids(decoder, PROMPTS[0])
    assert found == ids(SpeculativeDecoder(model, None, (), None), PROMPTS[0])
    assert found != ids(SpeculativeDecoder(target, None, (), None), PROMPTS[0])


@pytest.mark.parametrize("tree", ["auto", None], ids=str)
def test_a_quantised_copy_of_a_model_that_was_checked_is_refused(tree):
    from torch.ao.quantization import quantize_dynamic

    model = tiny_llama().float()
    SpeculativeDecoder(model, None, ["ngram"], tree)
    quantised = quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match="later tokens or other rows"):
        SpeculativeDecoder(quantised, None, ["ngram"], tree)


def test_a_model_that_can_only_score_chains_since_the_last_call_gets_chains(target, monkeypatch):
    """The run falls back as a new decoder would, and says so."""
    import specinfer.decoder
    from specinfer.attention import Support

    decoder = SpeculativeDecoder(target, None, ["ngram"], BestFirst(8, 3))
    checked = specinfer.decoder.check_model
    monkeypatch.setattr(
        specinfer.decoder, "check_model", lambda m: checked(m)._replace(support=Support.CHAIN_ONLY, reason="so")
    )
    result = decoder.generate(PROMPTS[2], max_new_tokens=NEW, temperature=0)
    assert all(len(step.tree.paths()) <= 1 for step in result.steps)
    assert result.stats.notes[0] == "tree=Chain(length=3): LlamaForCausalLM can score chains only (so)"
    assert decoder.policy == BestFirst(8, 3)

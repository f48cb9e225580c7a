"""A generation in a notebook as it happens, and bars where someone watches.  IPython is made up."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PROMPTS, byte_tokenizer, like, tiny_llama

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.errors import InputError, NumericalError
from specinfer.viz import live
from specinfer.viz.live import watch

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    model = tiny_llama()
    return SpeculativeDecoder(model, byte_tokenizer(), [like(model, 0.02)], BestFirst(6, 3))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook shows, one after the other in one place."""
    shown_pages: list[str] = []

    def display(page: str, display_id: bool) -> Any:
        assert display_id
        return SimpleNamespace(update=shown_pages.append)

    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    monkeypatch.setattr(live, "PAUSE", 0)
    return shown_pages


def test_text_and_trees_appear_as_they_come(decoder: SpeculativeDecoder, pages: list[str]) -> None:
    """A page a step and one at the end; the text is that of `generate`."""
    result = watch(decoder, PROMPTS[0], **OPTIONS)
    assert result.token_ids == decoder.generate(PROMPTS[0], **OPTIONS).token_ids
    assert len(pages) == len(result.steps) + 1
    counts = [sum(len(step.tokens) for step in result.steps[: number + 1]) for number in range(len(result.steps))]
    assert [page.split("<small>")[1].split()[0] for page in pages] == [*map(str, counts), str(counts[-1])]
    assert all("<svg" in page and "token tree of" in page for page in pages)


def test_pages_come_no_faster_than_they_can_be_read(decoder: SpeculativeDecoder, pages: list[str], monkeypatch) -> None:
    monkeypatch.setattr(live, "PAUSE", 1e9)
    watch(decoder, PROMPTS[0], **OPTIONS)
    assert len(pages) == 1


def test_text_is_no_markup(decoder: SpeculativeDecoder) -> None:
    result = decoder.generate(PROMPTS[0], **OPTIONS)
    hostile = SimpleNamespace(text="<script>alert(1)</script>", stats=result.stats)
    assert "<script>" not in live.view(hostile, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, NumericalError("no numbers")])
def test_what_was_decoded_is_kept(decoder: SpeculativeDecoder, pages: list[str], monkeypatch, failure) -> None:
    """An interrupted cell has its result; an error carries it; both stay on the page."""
    seen = iter(range(2))

    def stop(result: Any, step: Any, view: Any = live.view) -> str:
        if next(seen, None) == 1:
            raise failure
        return str(view(result, step))

    monkeypatch.setattr(live, "view", stop)
    if failure is KeyboardInterrupt:
        result = watch(decoder, PROMPTS[0], **OPTIONS)
    else:
        with pytest.raises(NumericalError) as caught:
            watch(decoder, PROMPTS[0], **OPTIONS)
        (result,) = caught.value.partial
    assert result.finish_reason == "unfinished"
    assert 0 < len(result.token_ids) < 12
    assert f"<small>{len(result.token_ids)} tokens" in pages[-1]


@pytest.mark.parametrize("ipython", [None, SimpleNamespace(get_ipython=lambda: None)], ids=["missing", "idle"])
def test_elsewhere_it_says_what_to_do(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, ipython) -> None:
    if ipython is None:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "IPython", ipython)
    with pytest.raises(InputError, match=r"needs a notebook.*decoder\.stream"):
        watch(decoder, PROMPTS[0])


def test_a_batch_is_refused(decoder: SpeculativeDecoder, pages: list[str]) -> None:
    with pytest.raises(InputError, match="one prompt"):
        watch(decoder, PROMPTS[:2], **OPTIONS)
    assert pages == []

"""Trees in terminals: marks, colours, what an encoding cannot hold, and words in place of ids."""

import pickle
import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PROMPTS, byte_tokenizer, like, tiny_llama

from specinfer import BestFirst, Result, SpeculativeDecoder, TokenTree
from specinfer.errors import InputError
from specinfer.results import Step, best_step
from specinfer.tree import Draw
from specinfer.viz import text
from specinfer.viz.style import ASCII, SHAPES, STYLES
from specinfer.viz.text import in_ascii

WORDS = {9: "The", 7: " sky", 8: "\n", 6: "\t", 5: "", 4: "天空", 3: " is\x00"}


class Words:
    """All that drawing needs of a tokenizer."""

    convert_ids_to_tokens = staticmethod(WORDS.get)
    decode = staticmethod(lambda ids: "".join(WORDS[token] for token in ids))


def stream(encoding: str, terminal: bool = False) -> Any:
    """What drawing needs of a stream."""
    return SimpleNamespace(encoding=encoding, isatty=lambda: terminal)


def tree(drafts: int = 2) -> TokenTree:
    """Six nodes: the path 7 8 by both drafts, one rejected sibling at each level, and one below a rejected one."""
    both = [Draw(draft, 0) for draft in range(drafts)]
    draws = [both, both, [Draw(0, 1)], [Draw(0, 1)], [Draw(0, 0)]]
    return TokenTree.from_nodes(9, [7, 8, 6, 5, 4], [0, 1, 1, 0, 4], [-0.5, -0.7, -3, -1.2, -1.5], draws)


STEP = Step(tree(), (1,), (7, 3), (("a", "b"), ()))


def test_every_node_says_who_drafted_it_and_what_became_of_it() -> None:
    assert text(STEP, tokenizer=Words()).splitlines() == [
        "The",
        "├─ ␠sky         61%  ● ▲ ✓",
        "│  ├─ ␠is\\x00            +",
        "│  ├─ ⏎         82%  ● ▲ ✗",
        "│  └─ ⇥          8%  ●   ✗",
        "└─ ∅            30%  ●   ✗",
        "   └┄ 天空      74%  ●",
        "● draft 0   ▲ draft 1   ✓ accepted   ✗ rejected   ┄ not reached   + bonus token",
    ]


def test_a_lone_tree_of_one_draft_needs_no_legend() -> None:
    assert str(tree(1)) == "9\n├─ 7      61%\n│  ├─ 8   82%\n│  └─ 6    8%\n└─ 5      30%\n   └─ 4   74%"
    assert str(TokenTree.root_only(9)) == "9"


def test_deep_trees_stay_narrow() -> None:
    """Where lines would be wrapped, a level takes a column less."""
    path = tuple(range(100, 124))
    deep = TokenTree.from_paths(9, {path[: n + 1]: -0.1 * n for n in range(len(path))}, 0)
    lines = str(deep).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("└─100")
    assert lines[24].startswith(" " * 46 + "└─123")
    assert str(deep.pruned(8)).splitlines()[8].startswith(" " * 21 + "└─ 107")


def test_colours_only_where_a_terminal_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its codes the coloured text is the other one."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain, coloured = text(STEP), text(STEP, stream("utf-8", terminal=True))
    assert "\x1b" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert text(STEP, stream("utf-8")) == plain
    for name, value in {"NO_COLOR": "1", "TERM": "dumb"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert text(STEP, stream("utf-8", terminal=True)) == plain


def test_colours_tell_drafts_and_states_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    lines = text(STEP, stream("utf-8", terminal=True)).splitlines()
    codes = [tuple(re.findall(r"\x1b\[([0-9;]*)m", line)) for line in lines]
    accepted, bonus, rejected = codes[1], codes[2], codes[3]
    assert len({accepted, bonus, rejected}) == 3
    assert lines[1].count("\x1b[34m") == lines[1].count("\x1b[33m") == 1  # the two drafts' shapes


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "latin-1"])
def test_what_an_encoding_cannot_hold_is_spelt_in_ascii(encoding: str) -> None:
    drawn = text(STEP, stream(encoding), Words())
    assert drawn.isascii()
    lines = drawn.splitlines()
    assert lines[1:7] == [
        "|- _sky              61%  1 2 *",
        "|  |- _is\\x00                 +",
        "|  |- \\n             82%  1 2 x",
        "|  `- \\t              8%  1   x",
        "`- ''                30%  1   x",
        "   `. \\u5929\\u7a7a   74%  1",
    ]
    assert lines[7].startswith("1 draft 0   2 draft 1   * accepted   x rejected   . not reached")


def test_every_sign_has_its_own_spelling() -> None:
    signs = [*SHAPES, "✎", "✓", "✗", "✂", "┄"]
    spelt = list(map(in_ascii, signs))
    assert len({*spelt, "+"}) == len(signs) + 1
    assert all(len(sign) == 1 and sign.isascii() for sign in spelt)
    assert set(map(ord, signs)) <= ASCII.keys()
    assert STYLES.keys() >= {"accepted", "cut", "rejected", "unreached"}


# ---- words, not ids ----


@pytest.fixture(scope="module")
def result() -> Result:
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, byte_tokenizer(), [like(model, 0.02), "ngram"], BestFirst(8, 3))
    found: Result = decoder.generate(PROMPTS[0], max_new_tokens=12, temperature=1.0, seed=3)
    return found


def test_steps_and_their_trees_show_words_and_names(result: Result) -> None:
    step = result.best_step
    assert str(step) == text(result)
    assert result.stats.drafts[0].draft in str(step)
    assert str(step.tree) == text(step.tree, tokenizer=result.tokenizer)
    ids = Step.from_dict(step.to_dict())
    assert ids == step
    assert str(ids) != str(step)


def test_what_they_are_shown_with_is_no_part_of_them(result: Result) -> None:
    step = result.best_step
    lone: Any = pickle.loads(pickle.dumps(step))
    assert lone == step
    assert lone.tokenizer is None
    kind = type(result.tokenizer).__name__.encode()
    assert kind not in pickle.dumps(step)
    assert kind not in pickle.dumps(result.steps)


@pytest.mark.parametrize("kept", [lambda r: pickle.loads(pickle.dumps(r)), deepcopy], ids=["pickle", "copy"])
def test_kept_results_show_the_same_words(result: Result, kept: Any) -> None:
    assert list(map(str, kept(result).steps)) == list(map(str, result.steps))


def test_saved_results_show_the_same_words(result: Result, tmp_path: Any) -> None:
    result.save(tmp_path / "result.json")
    assert list(map(str, Result.load(tmp_path / "result.json").steps)) == list(map(str, result.steps))


# ---- which step ----


def test_the_step_to_look_at_branches_and_was_accepted_in_part() -> None:
    """A longer chain, accepted whole, shows less."""
    chain = TokenTree.from_paths(9, {(7,): -0.1, (7, 8): -0.2, (7, 8, 6): -0.3}, 0)
    chained = Step(chain, (1, 2, 3), (7, 8, 6, 5), ((),) * 4)
    rejected = Step(tree(), (), (3,), ((),))
    deeper = Step(tree(), (1, 2), (7, 8, 3), ((),) * 3)
    assert best_step([chained, rejected, STEP, deeper]) == 3
    assert best_step([rejected, chained]) == 1
    assert best_step([rejected, rejected]) == 0
    with pytest.raises(InputError, match="no step was decoded"):
        best_step([])

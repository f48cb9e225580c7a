"""`specinfer chat`: turns that begin with what was read, commands, colours, and what Ctrl-C does."""

import re
import sys

import pytest
from conftest import byte_tokenizer
from test_cli import PROMPT, TEMPLATE, Terminal, models, run  # noqa: F401  # fixtures

from specinfer import SpeculativeDecoder
from specinfer.attention import TreeSession

NEW = ["--max-new-tokens", "12"]


@pytest.fixture
def chat(run):  # noqa: F811
    """Run a conversation, line by line; return exit code, standard output and standard error."""
    return lambda *lines, options=(): run("chat", "--draft", "draft", *NEW, *options, stdin="\n".join(lines))


def answers(models, *texts, **options):  # noqa: F811
    """Return what fresh calls on the whole history answer."""
    decoder, messages = SpeculativeDecoder(models[None], byte_tokenizer(chat_template=TEMPLATE), tree=None), []
    for text in texts:
        messages.append({"role": "user", "content": text})
        result = decoder.generate(messages, **{"max_new_tokens": 12, "temperature": 0, "seed": 0} | options)
        messages.append({"role": "assistant", "content": result.text})
    return [message["content"] for message in messages[1::2]]


def test_every_turn_answers_the_whole_conversation(chat, models):  # noqa: F811
    code, out, _ = chat("hi", "why?", "", "and then?")
    assert code == 0
    assert out == "".join(f"{answer}\n" for answer in answers(models, "hi", "why?", "and then?"))


def test_a_turn_does_not_read_again_what_was_read(chat):
    """At least the first prompt; more if the answer is cut into the tokens that it was made of."""
    out = chat("a long beginning, which is read once", "/stats", "hi", "/stats")[1]
    (first, none), (second, known) = [tuple(map(int, pair)) for pair in re.findall(r"prompt: (\d+) tokens, (\d+)", out)]
    assert none == 0
    assert first - 1 <= known < second  # the last one was the root
    assert "target passes" in out


def test_commands(chat, models):  # noqa: F811
    """/tree draws, /seed sets, /new forgets, /help lists, /exit ends."""
    options = ["--temperature", "0.8"]
    (first,), (second,) = answers(models, "hi", temperature=0.8), answers(models, "hi", temperature=0.8, seed=7)
    lines = ["hi", "/tree", "/tree 1", "/new", "/seed 7", "hi", "/seed", "/help", "/exit", "never read"]
    code, out, _ = chat(*lines, options=options)
    assert code == 0
    parts = [
        *map(re.escape, (first, "step ")),
        r"\d+: \d+ of \d+ drafted",
        "step 1: ",
        re.escape(second),
        "seed 7",
        "/tree",
    ]
    assert re.search(".*".join(parts), out, re.DOTALL)
    assert "never" not in out


def test_a_system_message_comes_first(chat, models):  # noqa: F811
    decoder = SpeculativeDecoder(models[None], byte_tokenizer(chat_template=TEMPLATE), tree=None)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    wanted = decoder.generate(messages, max_new_tokens=12, temperature=0).text
    assert chat("hi", options=["--system", "Be short."])[1] == wanted + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/stats", "there is no answer yet"),
        ("/tree", "there is no answer yet"),
        ("/stat", "/stat is not a command: /help"),
        ("/seed x", "/seed x is not a seed"),
        ("x" * 300, "context of 256"),
        ("\udcff", "the tokenizer refuses this prompt"),
    ],
)
def test_what_cannot_be_done_is_one_line(chat, monkeypatch, line, message):
    """It ends a script.  Somebody who types goes on."""
    code, out, err = chat(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_somebody_who_types_goes_on_after_a_mistake(run, models, monkeypatch):  # noqa: F811
    """Prompts and mistakes are no part of what is piped on."""
    typed = iter(["/stat", "hi"])

    def line(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("io.StringIO", Terminal)
    code, out, err = run("chat", "--draft", "draft", *NEW)
    assert (code, out) == (0, answers(models, "hi")[0] + "\n")
    assert "/stat is not a command" in err
    assert "/help lists commands" in err


def test_an_interrupted_answer_is_kept_and_the_conversation_goes_on(chat, models, monkeypatch):  # noqa: F811
    scored, score = [], TreeSession.score

    def interrupted(session, trees):
        scored.append(session)
        if len(scored) == 4:
            raise KeyboardInterrupt
        return score(session, trees)

    monkeypatch.setattr(TreeSession, "score", interrupted)
    code, out, _ = chat("hi", "go on", options=["--tree", "none"])
    first, second = out.splitlines()
    whole = answers(models, "hi")[0]
    assert code == 0
    assert whole.startswith(first)
    assert first != whole
    decoder = SpeculativeDecoder(models[None], byte_tokenizer(chat_template=TEMPLATE), tree=None)
    roles = zip(("user", "assistant", "user"), ("hi", first, "go on"), strict=True)
    messages = [{"role": role, "content": content} for role, content in roles]
    assert second == decoder.generate(messages, max_new_tokens=12, temperature=0).text


def test_accepted_tokens_have_their_drafts_colour(run, models, monkeypatch):  # noqa: F811
    """On a terminal, unless NO_COLOR is set; without the codes it is the same text."""
    wanted = answers(models, "hi")[0] + "\n"
    for setting, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", setting)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stdout", Terminal())
        assert run("chat", "--draft", "draft", "--tree", "best-first", *NEW, stdin="hi")[0] == 0
        out = sys.stdout.getvalue()
        assert ("\x1b[34m" in out) == coloured
        assert re.sub(r"\x1b\[[0-9;]*m", "", out) == wanted


def test_a_target_without_turns_is_refused(run, monkeypatch):  # noqa: F811
    monkeypatch.setattr("test_cli.TEMPLATE", None)
    code, out, err = run("chat", stdin="hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has no chat template" in err

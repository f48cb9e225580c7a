"""The benchmark of Spec-Bench's questions: answer files in its form, and tables that count as its script does."""

import json
import sys

import pytest
from conftest import byte_tokenizer, like, tiny_llama

from specinfer import ModelDraft

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
NEW = 12
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["abcabc", "and then abcabc?"]},
    {"question_id": 82, "category": "writing", "turns": ["one two one two"]},
    {"question_id": "q-1", "category": "rag", "turns": ["x" * 300]},  # longer than the context
    {"question_id": "q-2", "category": "rag", "turns": ["1, 2, 3, 1, 2, "], "reference": ["3"]},
    {"question_id": 84, "category": "writing", "turns": ["beyond the count"]},
]


@pytest.fixture(scope="module")
def bench(script):
    return script("spec_bench")


@pytest.fixture
def run(bench, tmp_path, monkeypatch, capsys):
    """Run it on a tiny model; return the answers by method, and what was printed."""
    model, tokenizer = tiny_llama(0), byte_tokenizer(chat_template=TEMPLATE)
    monkeypatch.setattr(bench, "load_target", lambda name, dtype: (model, tokenizer))
    monkeypatch.setattr(bench, "load_draft", lambda name, *_: ModelDraft(like(model), tokenizer, name=name))
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "question.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))

    def call(*options):
        sizes = ["--count", "2", "--max-new-tokens", str(NEW)]
        arguments = ["--questions", tmp_path / "questions", "--out", tmp_path / "out", *sizes, *options]
        monkeypatch.setattr(sys, "argv", ["spec_bench.py", *map(str, arguments)])
        bench.main()
        files = {file.stem: file.read_text().splitlines() for file in (tmp_path / "out").glob("*.jsonl")}
        return {method: [json.loads(line) for line in lines] for method, lines in files.items()}, capsys.readouterr()

    return call


@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_are_written_as_spec_bench_writes_them(run, temperature):
    """Every turn of every question that fits; the drafts change steps, not texts."""
    found, printed = run("--methods", "plain", "ngram+near", "--tree", "best-first", "--temperature", temperature)
    assert set(found) == {"plain", "ngram+near"}
    assert "question q-1 is left out" in printed.err
    for method, lines in found.items():
        assert [(line["question_id"], line["category"], line["model_id"]) for line in lines] == [
            (81, "writing", method),
            (82, "writing", method),
            ("q-2", "rag", method),
        ]
        for line, turns in zip(lines, (2, 1, 1), strict=True):
            (choice,) = line["choices"]
            assert {len(choice[name]) for name in ("turns", "new_tokens", "wall_time", "decoding_steps")} == {turns}
            assert choice["new_tokens"] == [NEW] * turns
            assert sum(choice["accept_lengths"]) == NEW * turns
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert min(choice["wall_time"]) > 0
    texts = [[line["choices"][0]["turns"] for line in lines] for lines in found.values()]
    assert texts[0] == texts[1]
    assert {length for line in found["plain"] for length in line["choices"][0]["accept_lengths"]} == {1}
    assert max(length for line in found["ngram+near"] for length in line["choices"][0]["accept_lengths"]) > 1


def test_a_later_turn_is_asked_after_the_methods_own_answer(bench):
    """The conversation alternates, and the seed is the question's."""
    asked = []

    class Echo:
        def generate(self, messages, seed, **options):
            asked.append(([(m["role"], m["content"]) for m in messages], seed, options))
            return type("Result", (), {"text": f"answer {len(asked)}", "steps": [], "token_ids": []})

    bench.answer(Echo(), {"turns": ["a", "b"]}, 5, {"max_new_tokens": 3})
    said = [("user", "a"), ("assistant", "answer 1"), ("user", "b")]
    assert asked == [(said[:1], 5, {"max_new_tokens": 3}), (said, 5, {"max_new_tokens": 3})]


def line(category, tokens, seconds, lengths):
    choice = {"new_tokens": tokens, "wall_time": seconds, "accept_lengths": lengths}
    return {"category": category, "choices": [choice]}


def test_tables_count_as_spec_benchs_script(bench):
    """Means over questions of rates, their ratio, and accepted tokens over all steps together."""
    answered = [
        {"plain": line("rag", [4, 4], [2.0, 2.0], [1] * 8), "auto": line("rag", [4, 4], [1.0, 1.0], [2, 2, 4])},
        {"plain": line("rag", [4], [2.0], [1] * 4), "auto": line("rag", [4], [0.5], [4])},
        {"plain": line("qa", [4], [1.0], [1] * 4), "auto": line("qa", [4], [1.0], [1, 3])},
    ]
    printed = bench.tables(answered)
    rows = [row for row in printed.splitlines() if row.startswith("| auto")]
    assert rows == [
        "| auto | 3 | 1 | 2 |",  # (4 + 8) / 2 over 2; 4 over 4; (4 + 8 + 4) / 3 over (2 + 2 + 4) / 3
        "| auto | 3 | 2 | 2.67 |",  # 12 / 4, 4 / 2, 16 / 6
        "| auto | 6 | 4 | 5.33 |",
    ]
    assert "| questions | 2 | 1 | 3 |" in printed
    alone = bench.tables([{"auto": lines["auto"]} for lines in answered])
    assert "| auto | - | - | - |" in alone


def test_the_categories_of_mt_bench_are_one(bench):
    """Where all eight are there; SPEED-Bench has some of these names, and keeps them apart."""
    answered = [{"plain": line(category, [1], [1.0], [1])} for category in sorted(bench.MT_BENCH)]
    assert "| method | mt_bench | overall |" in bench.tables(answered)
    assert "| questions | 8 | 8 |" in bench.tables(answered)
    assert "mt_bench" not in bench.tables(answered[1:])


def test_lines_that_are_no_questions_are_refused(bench, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question_id": 1, "category": "qa", "turns": ["a"]}\n{"prompt": "a"}\n')
    with pytest.raises(bench.InputError, match=r"line 2 is no question"):
        bench.read_questions(tmp_path / "q.jsonl", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(bench.InputError, match="has no questions"):
        bench.read_questions(tmp_path / "empty", None)

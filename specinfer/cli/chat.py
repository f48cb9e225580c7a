"""``specinfer chat``: a conversation in the terminal.

Knows: options, lines that are typed, commands among them, colours of drafts.
Does not know: how text is decoded, how a turn begins with what the last one read (`engine.store`).
"""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from specinfer.cli import options
from specinfer.cli.generate import BEST, drawn, print_stats, step_index
from specinfer.common.progress import busy, close_bars
from specinfer.errors import InputError, SpecinferError

if TYPE_CHECKING:
    from specinfer.calls.run import Run
    from specinfer.decoder import SpeculativeDecoder
    from specinfer.results import Result

LONG = options.Sampling(max_new_tokens=512)
HELP = """\
/stats           what speculation did for the last answer
/tree [N|best]   the tree of one of its steps
/seed [N]        show or set the seed of the answers to come
/new             begin a new conversation
/exit            end, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(
    *,
    models: options.Models,
    trees: options.Trees,
    sampling: options.Sampling = LONG,
    system: Annotated[str | None, Option(help="A system message.", show_default="the chat template's")] = None,
) -> None:
    """Talk to the target; accepted tokens have the colour of their draft. Earlier turns are not read again."""
    conversation = Chat(models.decoder(grown=trees.policy), system, sampling)
    if sys.stdin.isatty():
        print(f"{conversation.legend}\n/help lists commands", file=sys.stderr)
    for line in lines():
        try:
            if not conversation.take(line):
                return
        except SpecinferError as error:
            if not sys.stdin.isatty():
                raise
            print(f"specinfer: {error}", file=sys.stderr)


def lines() -> Iterator[str]:
    """Yield the lines that are typed, or stand on standard input; Ctrl-C drops a line."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys edit the line, and find earlier ones
    while True:
        try:
            if line := input("> " if typed else "").strip():
                yield line
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends", file=sys.stderr)
        except EOFError:
            return


class Chat:
    """A conversation under way.

    Args:
        decoder: whose target answers.
        system: the system message, if any.
        sampling: options of every answer.

    Raises:
        InputError: the target has no chat template.
    """

    def __init__(self, decoder: "SpeculativeDecoder", system: str | None, sampling: options.Sampling) -> None:
        from specinfer.viz.style import SHAPES, TERMINAL, by_draft
        from specinfer.viz.text import in_colours

        if not getattr(decoder.tokenizer, "chat_template", None):
            raise InputError("this target has no chat template, so it takes no turns: use `specinfer generate`")
        self.decoder, self.sampling = decoder, sampling
        self.beginning = [{"role": "system", "content": system}] if system else []
        names = enumerate(draft.name for draft in decoder.drafts) if in_colours(sys.stdout) else ()
        self.looks = {name: (SHAPES[number % len(SHAPES)], TERMINAL[by_draft(number)]) for number, name in names}
        self.new()

    def new(self, _: str = "") -> None:
        """Begin a new conversation: forget everything that was said."""
        from specinfer.engine.store import PrefixStore

        self.messages = [*self.beginning]
        self.store = PrefixStore()
        self.result: Result | None = None  # the last answer

    @property
    def legend(self) -> str:
        """The drafts in their colours, if there are colours."""
        from specinfer.viz.text import painted

        signs = [painted(f"{shape} {name}", codes) for name, (shape, codes) in self.looks.items()]
        return "   ".join([*signs, "the target's own"]) if signs else ""

    def take(self, line: str) -> bool:
        """Answer a message or follow a command; return whether the conversation goes on.

        Raises:
            SpecinferError: it cannot be answered or done; earlier messages stay.
        """
        name, _, value = line.partition(" ")
        commands = {f"/{each.__name__}": each for each in (self.stats, self.tree, self.seed, self.new, self.help)}
        if name == "/exit":
            return False
        if not name.startswith("/"):
            self.answer(line)
        elif name in commands:
            commands[name](value.strip())
        else:
            raise InputError(f"{name} is not a command: /help lists them")
        return True

    def answer(self, text: str) -> None:
        """Print the answer to a message as it comes, and keep both; Ctrl-C ends it where it is."""
        from specinfer.calls.run import Run
        from specinfer.viz.text import painted

        messages = [*self.messages, {"role": "user", "content": text}]
        run = Run([self.decoder.prepare(messages, **asdict(self.sampling))], store=self.store)
        with busy("reading"):
            try:
                for piece, author in authored(run, self.decoder.tokenizer):
                    close_bars()
                    print(painted(piece, self.looks[author][1]) if author in self.looks else piece, end="", flush=True)
            except KeyboardInterrupt:
                run.close()
        print()
        (self.result,) = run.results()
        self.messages = [*messages, {"role": "assistant", "content": self.result.text}]

    def stats(self, _: str = "") -> None:
        """Print the figures of the last answer."""
        result = self._answered()
        known = result.stats.cached_tokens
        print(f"prompt: {len(result.prompt_ids)} tokens, {known} of them known from the turn before")
        print_stats(result, sys.stdout)

    def tree(self, step: str) -> None:
        """Draw the tree of a step of the last answer."""
        result = self._answered()
        print(drawn(result, step_index(step or BEST, result)))

    def seed(self, number: str) -> None:
        """Set or show the seed."""
        if number:
            try:
                self.sampling = replace(self.sampling, seed=int(number))
            except ValueError:
                raise InputError(f"/seed {number} is not a seed: give a whole number") from None
        print(f"seed {self.sampling.seed}{'' if self.sampling.temperature else ', of no effect at temperature 0'}")

    def help(self, _: str = "") -> None:
        """List the commands."""
        print(HELP)

    def _answered(self) -> "Result":
        if self.result is None or not self.result.steps:
            raise InputError("there is no answer yet: say something first")
        return self.result


def authored(run: "Run", tokenizer: object) -> Iterator[tuple[str, str]]:
    """Yield a run's text as it is decoded, each piece with the first draft that proposed its last token, or ""."""
    from specinfer.engine.detokenize import Pieces

    row, done, author = run.rows[0], 0, ""
    pieces = Pieces(tokenizer, row.prompt_length)
    for ((_, step),) in run:
        for number, names in enumerate(step.drafted_by, len(row.ids) - len(step.tokens) + 1):
            author = names[0] if names else ""
            if piece := pieces.more(row.ids[:number]):
                done += len(piece)
                yield piece, author
    if rest := run.results()[0].text[done:]:
        yield rest, author

"""The command line: ``specinfer COMMAND``.

Knows: which commands there are, and exit codes.  Does not know: what a command does (its own module does).
Results go to stdout; summaries, progress and errors go to stderr.  A user's error is one line and exit code 2, never a
traceback.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from typer import Option

from specinfer.cli import checks, distill, evidence, generate
from specinfer.cli.chat import chat
from specinfer.cli.measure import PRESETS, compare
from specinfer.cli.options import flattened
from specinfer.cli.serve import serve
from specinfer.cli.terminal import INTERRUPTED
from specinfer.common.progress import close_bars
from specinfer.common.versions import VERSION
from specinfer.errors import SpecinferError

app = typer.Typer(
    no_args_is_help=True,
    help="Generate text with token trees that a small model drafts and the target verifies, exactly.",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate.generate,
    "chat": chat,
    "serve": serve,
    "tree": generate.tree,
    "compile": checks.compile_passes,
    "check-model": checks.check_model,
    "check-draft": checks.check_draft,
    "certify": checks.certify,
    "compare": compare,
    "record": evidence.record,
    "replay": evidence.replay,
    "paper-tables": evidence.paper_tables,
    "distill": distill.distill,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(flattened(_command))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"specinfer {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    pass


app.command("bench", help="Run compare --preset bench.", context_settings={"default_map": PRESETS["bench"]})(
    flattened(compare)
)


def main() -> None:
    """Run the command line; turn every user's error into one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a text is not lost to an encoding that cannot hold it
    try:
        try:
            code = app(standalone_mode=False)
        finally:
            close_bars()
    except SpecinferError as error:
        fail(str(error))
    except UnicodeError as error:
        fail(f"text that the terminal's encoding cannot hold ({error}): set PYTHONUTF8=1, or give text in UTF-8")
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as error:
        fail(f"cannot read or write {error.filename or 'what was asked for'}: {error.strerror or error}")
    except Exception as error:
        if _ran_out_of_memory(error):
            fail("memory ran out: take fewer nodes or levels, a smaller batch, or a smaller model")
        if not hasattr(error, "format_message"):  # click's usage errors have it; typer may bring its own click
            raise
        fail(error.format_message())
    if code == INTERRUPTED:  # also typer's own code for it
        print(file=sys.stderr)  # what stands on the line stays
    raise SystemExit(code or 0)


def _ran_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: torch raises `OutOfMemoryError` on GPUs, and says it in words on CPUs."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def fail(message: str) -> None:
    """Print one line on stderr and exit with code 2; of several processes with the same line, the first prints it."""
    line = " ".join(message.split())
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and line:
        from specinfer.common.ranks import rank, repeats

        line = "" if repeats(line) else f"rank {rank()}: {line}" if rank() else line
    if line:  # typer raises an error without a message after it printed its help
        print(f"specinfer: {line}", file=sys.stderr)
    raise SystemExit(2)

"""Write docs/cli.md, the reference of the command line: python docs/cli.py

Everything comes from what `--help` prints, 100 columns wide.
"""

from pathlib import Path

import typer

from specinfer.cli import app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100  # columns
INTRODUCTION = """\
# Command line

What each command prints with `--help`.  `docs/cli.py` writes this page: do not edit it by hand.
[Choosing](choosing.md#on-the-command-line) says what the commands have in common, with examples.
"""


def page() -> str:
    """Return the whole page."""
    commands = {"specinfer": (group := typer.main.get_group(app))}
    commands |= {f"specinfer {name}": command for name, command in group.commands.items() if not command.hidden}
    return "\n".join([INTRODUCTION, *(section(*named) for named in commands.items())])


def section(name: str, command: typer.core.TyperCommand | typer.core.TyperGroup) -> str:
    """Return a command's heading and its help, without rich's frames and colours."""
    command.rich_markup_mode = None
    context = command.context_class(command, info_name=name, terminal_width=WIDTH)
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join([f"## {name}\n", "```text", *lines, "```\n"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

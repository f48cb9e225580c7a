"""A generation in a notebook, as it happens: the text and the newest tree, each in place of the one before.

Knows: runs, IPython's display.  Does not know: how steps are decoded, pages.
"""

import sys
from html import escape
from time import monotonic
from typing import Unpack

from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.options import Options
from specinfer.errors import InputError, SpecinferError
from specinfer.prompts import Prompt
from specinfer.results import Result, Step
from specinfer.viz.description import describe
from specinfer.viz.svg import svg_of

PAUSE = 0.1  # seconds between two pictures at least, so that drawing does not slow decoding down


def watch(decoder: SpeculativeDecoder, prompt: Prompt = None, **options: Unpack[Options]) -> Result:
    """Generate for one prompt in a notebook; the text and the newest tree appear as they come.

    Interrupting the cell ends the text there; what was decoded is returned.

    Args:
        decoder: a `SpeculativeDecoder`.
        prompt, options: as its `open` takes them.

    Raises:
        InputError: this is no notebook, or there is more than one prompt; and what `open` raises.
        SpecinferError: as `generate`; its ``partial`` holds the result so far.
    """
    if not in_notebook():
        advice = "iterate over decoder.stream(prompt), or draw a result with to_html"
        raise InputError(f"a live view needs a notebook with IPython, and this is not one: {advice}")
    from IPython.display import HTML, display

    run = decoder.open(prompt, **options)
    if not run.single:
        raise InputError("a live view shows one prompt: watch them one by one, or use generate for a batch")
    handle = display(HTML(""), display_id=True)
    drawn, newest = monotonic(), None
    try:
        for ((_, step),) in run:
            newest = step if len(step.tree) > 1 else newest
            if monotonic() - drawn >= PAUSE:
                handle.update(HTML(view(run.results()[0], newest)))
                drawn = monotonic()
    except KeyboardInterrupt:
        run.close()
    except SpecinferError as error:
        error.partial = tuple(run.results())
        raise
    finally:
        (result,) = run.results()
        handle.update(HTML(view(result, newest)))
    return result


def in_notebook() -> bool:
    """Return whether this is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def view(result: Result, step: Step | None) -> str:
    """Return the text so far, figures, and one of its steps, if any, as HTML."""
    stats = result.stats
    figures = f"{stats.new_tokens} tokens, {stats.tokens_per_target_pass:.2f} per target pass"
    text = f'<pre style="white-space:pre-wrap">{escape(result.text)}</pre>'
    picture = f'<div style="overflow-x:auto">{svg_of(describe(step))}</div>' if step else ""
    return f"{text}\n<p><small>{figures}</small></p>\n{picture}"

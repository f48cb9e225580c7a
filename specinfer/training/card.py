"""A trained draft's model card: README.md by the template card.md, and a plot of its training where matplotlib is.

Knows: what was trained, on what, and how well the draft predicts held-out text.  Does not know: how it was trained.
"""

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from jinja2 import StrictUndefined, Template

from specinfer.common.files import write_whole
from specinfer.common.progress import Figures
from specinfer.training.job import TrainingJob
from specinfer.training.recorded_text import TextSettings, TrainingPrompt

LOSS_ROWS = 12  # of the card's table of losses
PLOT = "loss.png"
ARCHITECTURES = {
    "head": "an EAGLE-style head: decoder layers on the target's hidden states that borrow its embedding and output",
    "lm": "a plain small causal language model in Hugging Face format",
}
LOSSES = {
    "kl": "the target's distribution (forward Kullback-Leibler divergence)",
    "token": "the target's chosen tokens",
}


def describe_data(
    prompts: Sequence[TrainingPrompt],
    documents: Sequence[TrainingPrompt],
    texts: int,
    tokens: int,
    settings: TextSettings,
) -> str:
    """Return the description of the training data, in Markdown."""
    temperatures = ", ".join(f"{temperature:g}" for temperature in settings.temperatures)
    text = (
        f"{texts:,} texts, {tokens:,} tokens, prompts included.\n\n"
        f"- The target's own text: up to {settings.new_tokens} new tokens, temperatures {temperatures} in turn, seed "
        f"{settings.seed}; prompts of {_by_file(prompts)}."
    )
    if documents:
        text += f"\n- Given text, learnt from under the target's distribution: {_by_file(documents)}."
    return text


def write_card(job: TrainingJob, data: str, figures: Figures) -> None:
    """Write ``README.md`` and, where matplotlib is installed, ``loss.png`` into the draft's folder.

    Args:
        job: that is done.
        data: the draft's training data (`describe_data`).
        figures: of the training: ``history`` (dicts of step, loss, held_out), ``hits[step][k - 1]``; of a
            head also ``coverage``, ``inverse_temperature`` and ``window``.

    Raises:
        SpecinferError, InputError: the disk is full, or the folder cannot be written.
    """
    history = figures["history"]
    source = files(__package__).joinpath("card.md").read_text(encoding="utf-8")
    template = Template(source, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    text = template.render(
        job=job,
        kind=ARCHITECTURES[job.arch],
        data=data,
        goal=LOSSES[job.settings.loss],
        losses=history[::-1][:: -(-len(history) // LOSS_ROWS)][::-1],  # evenly spaced, the last step among them
        plot=PLOT if write_plot(job.folder / PLOT, history) else None,
        figures=figures,
    )
    write_whole(job.folder / "README.md", text)


def write_plot(path: Path, history: Sequence[Figures]) -> bool:
    """Plot loss and held-out hit rates of the first draft step against steps; return whether there is matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [entry["step"] for entry in history]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(steps, [entry["loss"] for entry in history], marker=".")
    left.set(xlabel="step", ylabel="training loss")
    for k, rates in enumerate(zip(*(entry["held_out"][0] for entry in history), strict=True), 1):
        right.plot(steps, rates, marker=".", label=f"top-{k}")
    right.set(xlabel="step", ylabel="held-out hit rate", ylim=(0, 1))
    right.legend(fontsize="small")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_whole(path, picture.getvalue())
    return True


def _by_file(prompts: Sequence[TrainingPrompt]) -> str:
    counts = Counter(Path(prompt.file).name for prompt in prompts)
    return ", ".join(f"{name} ({number:,})" for name, number in counts.items())

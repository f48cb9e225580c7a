"""Every error that specinfer raises on purpose, in one hierarchy.

Knows: names.  Does not know: anything else; it imports nothing, and everything may import it.

    SpecinferError
    ├── TreeError
    ├── PolicyError
    ├── PairingError
    ├── InputError
    ├── SamplingError
    │   └── NoTokenLeft
    ├── ModelError
    │   ├── UnsupportedModel
    │   ├── NotCompiled
    │   └── TokenizerMismatch
    ├── CacheError
    ├── RankError
    └── NumericalError

A message says what is wrong, why it matters, and what to do.
"""

CHECK_WEIGHTS = "Check the weights, or load the model in float32"  # advice, where logits are not numbers


def one_line(error: BaseException, longest: int = 200) -> str:
    """Return the beginning of an error's message as one line, or the error's type if it has no message."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def first_names(names: list[str], most: int) -> str:
    """Return the first names, as a message lists them; dots say that there are more."""
    return f"{'; '.join(names[:most])}{'; ...' if len(names) > most else ''}"


class SpecinferError(Exception):
    """Base class: catch this to catch everything specinfer raises on purpose.

    Attributes:
        partial: the results decoded before the error, one per row; empty if nothing was decoded.
    """

    partial: tuple[object, ...] = ()

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).split()))  # one line, whatever it quotes


class TreeError(SpecinferError, ValueError):
    """A token tree violates its invariants; the message names the node."""


class PolicyError(SpecinferError, ValueError):
    """A growth policy was given a budget that no tree can have."""


class PairingError(SpecinferError, ValueError):
    """A verifier was paired with a kind of tree for which it would change the target's output distribution."""


class InputError(SpecinferError, ValueError):
    """A prompt, token id, seed or length that cannot be decoded."""


class SamplingError(SpecinferError, ValueError):
    """A sampling option is unknown, contradictory, or cannot work with token trees."""


class NoTokenLeft(SamplingError):
    """A grammar and the call's other options leave no token: the row ends, and no other."""


class ModelError(SpecinferError):
    """A model, draft or tokenizer cannot be loaded or used."""


class UnsupportedModel(ModelError):
    """The model's attention cannot score a token tree (or anything at all) through a tree mask."""


class TokenizerMismatch(ModelError):
    """Draft and target have different token tables."""


class CacheError(SpecinferError):
    """The KV cache was asked for rows or slots it does not have."""


class RankError(SpecinferError):
    """Processes that share a model did not start, were lost, or disagree on what to run."""


class NumericalError(SpecinferError, ArithmeticError):
    """Logits or a loss that are not numbers; the message says whose, and for the target also the row and the step."""


class NotCompiled(ModelError):
    """A model's passes cannot be compiled, or a package of them cannot be used: the plain model runs, with a note."""

"""Every error a user of specinfer can meet, in one hierarchy.

This module knows names and nothing else: it imports nothing, and everything may import it.

    SpecinferError
    ├── TreeError              a token tree that is not one
    ├── PolicyError            a growth policy with an impossible budget
    ├── PairingError           a verifier that is not exact for the kind of tree it is given
    ├── InputError             a prompt, token id, seed or length that cannot be decoded
    ├── SamplingError          a sampling option that is unknown, contradictory or impossible on trees
    ├── ModelError             a model, draft or tokenizer that cannot be loaded or used
    │   ├── UnsupportedModel   ... because its attention cannot score a token tree
    │   ├── NotCompiled        ... by compiled passes: the plain model runs instead, and a note says why
    │   └── TokenizerMismatch  ... because draft and target do not speak the same tokens
    ├── CacheError             the KV cache was asked for what it cannot hold
    └── NumericalError         logits that are not numbers (names the decode step)

A message says what is wrong, why it matters, and what to do.
"""


class SpecinferError(Exception):
    """Base class: catch this to catch everything specinfer raises on purpose.

    Attributes:
        partial: the results decoded before an error under way, one per row; empty if nothing was.
    """

    partial: tuple[object, ...] = ()


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


class ModelError(SpecinferError):
    """A model, draft or tokenizer cannot be loaded or used."""


class UnsupportedModel(ModelError):
    """The model's attention cannot score a token tree (or anything at all) through a tree mask."""


class TokenizerMismatch(ModelError):
    """Draft and target have different token tables."""


class CacheError(SpecinferError):
    """The KV cache was asked for rows or slots it does not have."""


class NumericalError(SpecinferError, ArithmeticError):
    """Logits or a loss that are no numbers; the message says whose, and of the target's the row and the step."""


class NotCompiled(ModelError):
    """A model's passes cannot be compiled, or a package of them cannot be used: the plain model runs instead."""

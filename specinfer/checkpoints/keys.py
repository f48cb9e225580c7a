"""The metadata of a file: typed, and with an account of what was asked for.

Knows: which keys change nothing.  Does not know: what the others mean.
"""

from typing import TypeVar

from specinfer.attention.packed.gguf import Gguf
from specinfer.errors import ModelError

T = TypeVar("T")

# tokens with a role, and the keys of their ids
ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
# Of the keys that could change a model, those that do not: descriptions, what is found out otherwise, ids of tokens
# that no text needs.
_UNUSED_OF_MODELS = "vocab_size", "rope.scaling.finetuned", "tensor_data_layout"
_UNUSED_OF_TOKENIZERS = (
    *("tokenizer.huggingface.json", "tokenizer.chat_templates", "tokenizer.ggml.token_type_count"),
    *(f"tokenizer.ggml.{role}_token_id" for role in ("seperator", "separator", "cls", "mask")),
    *(f"tokenizer.ggml.{role}_token_id" for role in ("prefix", "suffix", "middle")),
    *(f"tokenizer.ggml.fim_{role}_token_id" for role in ("pre", "suf", "mid", "pad", "rep", "sep")),
)


class Keys:
    """The metadata of a file, each value of the type that is asked for.

    Keys of the architecture and of the tokenizer are what changes a model.  All others describe the file.

    Attributes:
        architecture: the model's, as ggml names it.
    """

    def __init__(self, file: Gguf) -> None:
        self.path, self._values = file.path, file.metadata
        self._left: set[str] = set()  # what was not asked for yet
        self.architecture = self.get("general.architecture", str)
        unused = {*_UNUSED_OF_TOKENIZERS, *(f"{self.architecture}.{key}" for key in _UNUSED_OF_MODELS)}
        for key in self._values.keys() - unused:
            template = key.startswith("tokenizer.chat_template.")  # for a special use, by name
            if key.startswith((f"{self.architecture}.", "tokenizer.")) and not template:
                self._left.add(key)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return a value.

        Raises:
            ModelError: it is of another type, or is missing and there is no default.
        """
        found = self._values.get(key, default)
        if found is None:
            raise self.refusal(f"its metadata lacks {key}")
        self._left.discard(key)
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise self.refusal(f"{key} is {found!r:.60}, and should be of type {kind.__name__}")
        return found

    def all(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """Return an array.

        Raises:
            ModelError: it has elements of another type, or is missing and there is no default.
        """
        found: list[T] = self.get(key, list, default)
        if any(type(each) is not kind for each in found):
            raise self.refusal(f"{key} is {found!r:.60}, and should be an array of type {kind.__name__}")
        return found

    def of_model(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return a value that the architecture has."""
        return self.get(f"{self.architecture}.{key}", kind, default)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def forget(self, key: str) -> None:
        """Take a key, if it is there, for one that changes nothing."""
        self._left.discard(key)

    def refusal(
        self, what: str, advice: str = "the file is damaged, or was converted by another program"
    ) -> ModelError:
        """Return an error to raise."""
        return ModelError(f"cannot load {self.path}: {what}; {advice}")

    def check_all_used(self) -> None:
        """Raise `ModelError` if a key that could change the model was not asked for."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            what = f"its metadata has {some}, which is not read, and may change the model"
            raise self.refusal(what, "use another file")

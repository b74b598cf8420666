"""What an id stands for, as people may see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from services.kernel.errors import SettingsError

_VISIBLE = {ord("\n"): "⏎", ord("\r"): "␍", ord("\t"): "⇥", 0x1B: "␛", 0: "␀"}


class Shown(NamedTuple):
    """A token's text, everything invisible in it made visible; `control` for tokens that are no text."""

    text: str
    control: bool


class Tokens:
    """The tokens of a model. Without a tokenizer they have no text."""

    def __init__(self, directory: Path | None, *, trust_remote_code: bool = False) -> None:
        self.tokenizer = load_tokenizer(directory, trust_remote_code=trust_remote_code) if directory else None
        self._control = set(self.tokenizer.all_special_ids) if self.tokenizer else set()
        added = self.tokenizer.added_tokens_decoder if self.tokenizer else {}
        self._control |= {id for id, token in added.items() if token.special or _is_tag(token.content)}
        self._known: dict[int, Shown] = {}

    def text(self, id: int) -> Shown:
        """One token."""
        if id not in self._known:
            text = self.decode([id]) if self.tokenizer else ""
            if self.tokenizer and "\ufffd" in text:  # a piece of a character: its own spelling tells more
                text = str(self.tokenizer.convert_ids_to_tokens(id))
            self._known[id] = Shown(text.translate(_VISIBLE), id in self._control)
        return self._known[id]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, nothing left out and nothing tidied. Raises SettingsError without a tokenizer."""
        if self.tokenizer is None:
            raise SettingsError("--tokenizer DIR is required: ids become text here")
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in `directory`. Raises SettingsError when there is none."""
    from transformers import AutoTokenizer  # takes a second

    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise SettingsError(f"no tokenizer can be loaded from {directory}: {error}") from error


def _is_tag(text: str) -> bool:
    """Models add tags such as <think> as plain tokens."""
    return text.startswith("<") and text.endswith(">") and len(text) > 2

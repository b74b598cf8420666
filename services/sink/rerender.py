"""The stored messages rendered and tokenised once more, with plain transformers, against the stored prompt ids."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from services.kernel.rendering import fix_date, with_date
from services.sink.rowchecks import Found

_COLUMNS = ["messages", "tools", "chat_template_kwargs", "input_ids", "prompt_length"]


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in `directory`. Raises OSError or ValueError when there is none."""
    from transformers import AutoTokenizer  # takes a second

    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)


def encode(tokenizer: Any, text: str) -> list[int]:
    """The ids of `text` and nothing more. Tokenizers in Python alone come with a model; they add nothing by themselves,
    and may not know the word for it."""
    return list(tokenizer.encode(text, add_special_tokens=False) if tokenizer.is_fast else tokenizer.encode(text))


class Rerender:
    """Compares with what `tokenizer` makes of the messages."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        templates = tokenizer.chat_template or ""
        fix_date(templates.values() if isinstance(templates, dict) else [templates])
        self.compared = 0

    def check(self, table: pa.Table) -> Found:
        """Rows whose prompt is not what the messages render to; rows without messages cannot be compared."""
        rows = table.select(_COLUMNS).to_pylist()
        for number, row in enumerate(rows):
            if row["messages"] is None:
                continue
            self.compared += 1
            try:
                text = self.tokenizer.apply_chat_template(
                    msgspec.json.decode(row["messages"]),
                    tools=None if row["tools"] is None else msgspec.json.decode(row["tools"]),
                    add_generation_prompt=True,
                    tokenize=False,
                    **with_date(msgspec.json.decode(row["chat_template_kwargs"])),
                )
            except Exception as error:  # whatever a template raises, the row cannot be rendered
                yield number, f"its messages cannot be rendered: {error!r}"
                continue
            rendered = encode(self.tokenizer, text)
            stored = row["input_ids"][: row["prompt_length"]]
            if rendered != stored:
                at = next(i for i, (a, b) in enumerate(zip_longest(rendered, stored)) if a != b)
                sizes = f"{len(rendered)} ids, the prompt has {len(stored)}"
                yield number, f"its messages render to {sizes}; they differ from index {at} on"

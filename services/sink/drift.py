"""What would have been lost, had outputs been kept as text: they are decoded and tokenised again, and compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa

from schemas.sequences import NEVER_CLOSED
from services.sink.rerender import encode


class Drift(msgspec.Struct, kw_only=True):
    """`drifted` rows have other output ids after decoding and encoding; in `moved` ones the reasoning would end at
    another token. Rows are without reasoning, or it was `closed`, or never (`open`); its tokens are counted in closed
    ones, the close tag included."""

    rows: int = 0
    drifted: int = 0
    output_tokens: int = 0
    moved: int = 0
    closed: int = 0
    open: int = 0
    reasoning_tokens: int = 0
    longest_reasoning: int = 0

    def text(self) -> str:
        """For people."""
        share = self.drifted / max(self.rows, 1)
        lines = [
            f"{self.drifted} of {self.rows} outputs ({share:.2%}) would have other ids, had they been kept as text"
        ]
        if self.closed or self.open:
            mean = self.reasoning_tokens / max(self.closed, 1)
            lines.append(
                f"reasoning: closed in {self.closed} rows, never closed in {self.open}, none in "
                f"{self.rows - self.closed - self.open}; {mean:.0f} tokens where closed (at most "
                f"{self.longest_reasoning}), its end would have moved in {self.moved}"
            )
        return "\n".join(lines)


def measure(table: pa.Table, tokenizer: Any, drift: Drift) -> None:
    """Add the rows of `table` to `drift`."""
    columns = ("input_ids", "prompt_length", "reasoning_end")
    for tokens, prompt, end in zip(*(table.column(name).to_pylist() for name in columns), strict=True):
        output = tokens[prompt:]
        drift.rows += 1
        drift.output_tokens += len(output)
        drift.drifted += _again(output, tokenizer) != output
        if end == NEVER_CLOSED:
            drift.open += 1
        elif end is not None:
            reasoning = output[: end + 1 - prompt]
            drift.closed += 1
            drift.reasoning_tokens += len(reasoning)
            drift.longest_reasoning = max(drift.longest_reasoning, len(reasoning))
            drift.moved += len(_again(reasoning, tokenizer)) != len(reasoning)


def _again(tokens: list[int], tokenizer: Any) -> list[int]:
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return encode(tokenizer, text)

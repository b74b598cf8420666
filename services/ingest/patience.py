"""When too much of a source is refused, it is not what it was declared to be: it stops, the others go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.ingest.lines import Line
from services.ingest.prompts import Made
from services.ingest.sources import Source

WINDOW = 1000  # records a ratio is judged by


class Patience:
    """With one source, since the process began."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._in_a_row = 0
        self._lately: deque[bool] = deque(maxlen=WINDOW)

    def after(self, lines: Sequence[Line], made: Made) -> str:
        """Why the source must stop after a batch; empty while it may go on."""
        refused = {letter.row for letter in made.letters} - {ready.row for ready in made.prompts}
        worst = 0
        for line in lines:
            bad = line.row in refused
            self._lately.append(bad)
            self._in_a_row = self._in_a_row + 1 if bad else 0
            worst = max(worst, self._in_a_row)
        most = made.refused.most_common(1)
        often = f"; most often, in the last batch: {most[0][0]}" if most else ""
        if worst >= self._source.max_bad_in_a_row:
            return f"{worst} records in a row were refused (max_bad_in_a_row: {self._source.max_bad_in_a_row}){often}"
        ratio = sum(self._lately) / WINDOW
        if len(self._lately) == WINDOW and ratio > self._source.max_bad_ratio:
            return (
                f"{ratio:.0%} of the last {WINDOW} records were refused (max_bad_ratio: {self._source.max_bad_ratio})"
                f"{often}"
            )
        return ""

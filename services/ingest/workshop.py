"""What the makers of all sources share: the model's facts, its tokenizer, the benchmarks to keep out. Loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.ingest import model, request, tokenizer_files
from services.ingest.asks import Asks
from services.ingest.prompts import PromptMaker
from services.ingest.settings import IngestSettings
from services.ingest.tokenizer import ChatTokenizer
from services.kernel.errors import SettingsError
from services.kernel.overlap import Overlap


class Workshop:
    """Makes the makers of sources, for the model of one label."""

    def __init__(self, settings: IngestSettings, label: str, date: str) -> None:
        """`date`: the day templates are told, unless the settings say another. Raises Fatal. Takes seconds."""
        self.settings, self._label, self._date = settings, label, settings.date or date
        directory = tokenizer_files.locate(settings)
        self._facts = model.load(settings, directory)
        self._tokenizer = ChatTokenizer(
            directory, trust_remote_code=settings.trust_remote_code, processes=settings.tokenizer_processes
        )
        self._overlaps: dict[tuple[Any, ...], Overlap] = {}

    def maker(self, source: Asks, folder: Path) -> PromptMaker:
        """The maker of a source whose relative paths start from `folder`. Raises Fatal for what it cannot ask."""
        return PromptMaker(
            request.resolve(source, self._label, self._facts, self._tokenizer, self._date),
            self._tokenizer,
            store_messages=self.settings.store_messages,
            overlap=self._overlap(source, folder),
        )

    def _overlap(self, source: Asks, folder: Path) -> Overlap | None:
        """What the source's prompts must not overlap with; files are read once, until they change."""
        if not source.exclude:
            return None
        files = [folder / file for file in source.exclude]
        key = (source.exclude_words, *((str(file), file.stat().st_mtime_ns if file.exists() else 0) for file in files))
        if key not in self._overlaps:
            try:
                self._overlaps[key] = Overlap.load(files, source.exclude_words)
            except SettingsError as error:
                raise SettingsError(f"source {source.name!r}: exclude: {error}") from error
        return self._overlaps[key]

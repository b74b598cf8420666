"""Which rows an export takes, and why it leaves the others.

Filters look at one row. Caps and ratios look at a whole source: of it, the rows with the lowest ranks are taken. Ranks
are hashes of record ids, so that the choice is the same whatever the order of the rows, and a larger cap takes the same
rows and more. Keys, by which rows are put in order, are other hashes: else a capped source would stand at the front.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from services.dataset import hashing
from services.dataset.filters import Filters, Wrong, numbers, strings
from services.dataset.hashing import Keys
from services.dataset.revisions import unhex
from services.kernel.errors import SettingsError
from services.kernel.overlap import Overlap, user_texts
from services.kernel.seen import SeenIds, pack

TRAIN, EVAL = "train", "eval"
_ALL_KEYS = np.uint64(2**64 - 1)


class Chosen(msgspec.Struct):
    """What becomes of the rows of a table: arrays of shape (rows,)."""

    keep: NDArray[np.bool_]
    keys: Keys
    ranks: Keys
    eval: NDArray[np.bool_]
    reasons: NDArray[np.object_]
    """Why a row is left out; None for those kept."""


class _Candidates(NamedTuple):
    """Rows of a source that may be taken: arrays of shape (rows,)."""

    ranks: Keys
    lengths: NDArray[np.int32]
    eval: NDArray[np.bool_]


class Selection:
    """First every table goes through `survey`, then `settle` is called, then `choose` says what is taken."""

    def __init__(self, filters: Filters, exclude: Overlap | None = None) -> None:
        self.filters, self._exclude = filters, exclude
        self._overlapping = SeenIds()
        self.sources: set[str] = set()  # that rows were seen of, taken or not
        self._candidates: dict[str, list[_Candidates]] = defaultdict(list)
        self.tokens = {TRAIN: 0, EVAL: 0}  # of the rows taken, each cut to max_length
        self._limits: dict[str, np.uint64] = {}
        self._not_compared = 0
        self.left_out: Counter[str] = Counter()
        self.left_out_tokens: Counter[str] = Counter()  # of their outputs

    @property
    def survey_columns(self) -> list[str]:
        """What `survey` must be given."""
        return [*self.filters.columns, *(["messages"] if self._exclude else [])]

    def survey(self, table: pa.Table) -> None:
        """Take note of the rows there are. 13 bytes of memory for each that may be taken."""
        chosen = self.choose(table)
        if self._exclude:
            self._note_overlaps(table.filter(pa.array(chosen.keep)), self._exclude)
            chosen = self.choose(table)
        for reason, tokens in zip(chosen.reasons, numbers(table, "output_length").tolist(), strict=True):
            if reason:
                self.left_out[reason] += 1
                self.left_out_tokens[reason] += tokens
        sources = strings(table, "source")
        self.sources.update(sources.tolist())
        total = numbers(table, "prompt_length") + numbers(table, "output_length")
        lengths = np.minimum(total, self.filters.max_length).astype(np.int32)
        for source in set(sources[chosen.keep]):
            here = chosen.keep & (sources == source)
            self._candidates[source].append(_Candidates(chosen.ranks[here], lengths[here], chosen.eval[here]))

    def settle(self) -> None:
        """All rows were surveyed: decide how many of each source are taken. Raises SettingsError for wrong names, and
        for rows that could not be compared with the excluded texts."""
        if self._not_compared:
            raise SettingsError(
                f"--exclude compares messages, and {self._not_compared} rows have none "
                "(TOKENHAUL_INGEST_STORE_MESSAGES was off, or the prompts were given as ids): choose other rows, "
                "or do without it"
            )
        found = {
            source: _Candidates(*map(np.concatenate, zip(*parts, strict=True)))
            for source, parts in self._candidates.items()
        }
        self._candidates.clear()
        counts = {source: len(each.ranks) for source, each in found.items()}
        for source, wanted in self._wanted(counts).items():
            ranks, lengths, to_eval = found[source]
            taken = np.ones(len(ranks), np.bool_)
            if wanted < counts[source]:
                self._limits[source] = np.partition(ranks, wanted)[wanted]
                taken = ranks < self._limits[source]
                self.left_out["cap or ratio of its source"] += int((~taken).sum())
            for split, here in ((EVAL, taken & to_eval), (TRAIN, taken & ~to_eval)):
                self.tokens[split] += int(lengths[here].sum(dtype=np.int64))

    def choose(self, table: pa.Table) -> Chosen:
        """What becomes of each row."""
        ids = strings(table, "id")
        reasons = np.full(len(table), None, object)
        for reason, wrong in self._wrong(table, ids):
            reasons[wrong & (reasons == None)] = reason  # noqa: E711  # elementwise
        keys, ranks = (hashing.keys(self.filters.seed, purpose, ids) for purpose in ("order", "rank"))
        if self._limits:
            limits = np.array([self._limits.get(source, _ALL_KEYS) for source in strings(table, "source")], np.uint64)
            reasons[(ranks >= limits) & (reasons == None)] = "cap or ratio of its source"  # noqa: E711
        # All turns and samples of a conversation go the same way: one must not be examined on what it was taught.
        conversations, prompts = strings(table, "conversation_id"), strings(table, "prompt_id")
        groups = [own or prompt for own, prompt in zip(conversations, prompts, strict=True)]
        by = hashing.keys(self.filters.seed, "eval", groups)
        return Chosen(reasons == None, keys, ranks, hashing.below(by, self.filters.eval_share), reasons)  # noqa: E711

    def _wrong(self, table: pa.Table, ids: NDArray[np.object_]) -> Wrong:
        """Each reason to leave rows out, and the rows it holds for."""
        yield from self.filters.wrong(table)
        if len(self._overlapping):
            yield "overlaps with an excluded text", self._overlapping.contains(unhex(table.column("id")))
        if self.filters.sample < 1:
            drawn = hashing.keys(self.filters.seed, "sample", ids)
            yield "sampled out", ~hashing.below(drawn, self.filters.sample)

    def _wanted(self, counts: Mapping[str, int]) -> dict[str, int]:
        """How many rows of each source are taken."""
        caps, ratios = self.filters.caps, self.filters.ratios
        if unknown := sorted((set(caps) | set(ratios)) - {*counts, ""}):
            known = ", ".join(sorted(counts)) or "none"
            raise SettingsError(f"--cap or --ratio names {', '.join(unknown)}; sources with rows to take are: {known}")
        wanted = {source: min(count, caps.get(source, caps.get("", count))) for source, count in counts.items()}
        if ratios:
            whole = min(wanted[source] / ratio for source, ratio in ratios.items())
            wanted = {source: int(whole * ratios.get(source, 0.0) + 1e-9) for source in counts}
        return wanted

    def _note_overlaps(self, table: pa.Table, exclude: Overlap) -> None:
        all_messages = strings(table, "messages")
        self._not_compared += int((all_messages == None).sum())  # noqa: E711
        found = [
            bytes.fromhex(id)
            for id, messages in zip(strings(table, "id"), all_messages, strict=True)
            if messages and exclude.find(user_texts(msgspec.json.decode(messages)))
        ]
        self._overlapping.add(pack(found))

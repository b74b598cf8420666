"""What `verify` found out about a dataset."""

from __future__ import annotations

import msgspec

from services.sink.accounts import Accounts
from services.sink.drift import Drift
from services.sink.exclusions import Exclusion

_KEPT_PROBLEMS = 1000


class Problem(msgspec.Struct, frozen=True):
    """Something wrong: the file (relative to the dataset; empty when it is about none), the row in it (from 0) if it is
    about one, and what."""

    file: str
    row: int | None
    what: str

    def __str__(self) -> str:
        place = self.file + ("" if self.row is None else f", row {self.row}")
        return f"{place}: {self.what}" if place else self.what


class Report(msgspec.Struct, kw_only=True):
    """Totals over all shards that can be read. `failures` are the prompts that ended as one, by reason: those a later
    row superseded are not among them. `discarded` are rows that some list of exclusions names. `problems` are the first
    thousand of `problem_count`."""

    directory: str
    dataset: str
    model: str
    partitions: int
    shards: int = 0
    rows: int = 0
    failures: dict[str, int] = {}
    duplicates: int = 0
    superseded: int = 0
    discarded: int = 0
    exclusions: list[Exclusion] = []
    gap: int = 0
    finish_reasons: dict[str, int] = {}
    prompt_tokens: int = 0
    output_tokens: int = 0
    bytes: int = 0
    token_bytes: int = 0
    rerendered: int | None = None
    drift: Drift | None = None
    accounts: Accounts | None = None
    problem_count: int = 0
    problems: list[Problem] = []

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problem_count

    @property
    def truncated(self) -> int:
        """Rows whose output ended because it was long enough."""
        return self.finish_reasons.get("length", 0)

    def problem(self, file: str, row: int | None, what: str) -> None:
        """Note something wrong."""
        self.problem_count += 1
        if len(self.problems) < _KEPT_PROBLEMS:
            self.problems.append(Problem(file, row, what))

    def account(self, accounts: Accounts) -> None:
        """Take in what became of the prompts; what must not be is a problem."""
        self.accounts = accounts
        for id in accounts.missing_ids:
            self.problem("", None, f"prompt {id} was answered, but neither the dataset nor the topic has its outcome")
        for id in accounts.twice_ids:
            self.problem("", None, f"prompt {id} stands on the topic more than once")
        if accounts.unasked:
            self.problem("", None, f"{accounts.unasked} outcomes are of no prompt on the topic")
        self.problem_count += accounts.missing - len(accounts.missing_ids) + accounts.twice - len(accounts.twice_ids)

    def text(self) -> str:
        """For people: every problem, then a short summary."""
        tokens = self.prompt_tokens + self.output_tokens
        lines = [str(problem) for problem in self.problems]
        if self.problem_count > len(lines):
            lines.append(f"... and {self.problem_count - len(lines)} more")
        lines += [
            f"{self.directory}: dataset {self.dataset}, model {self.model}, {self.partitions} partitions, "
            f"{self.shards} shards, {self.bytes} bytes",
            f"{self.rows} rows ({_counts(self.finish_reasons)}), {sum(self.failures.values())} failures "
            f"({_counts(self.failures)}), {self.duplicates} duplicates dropped, {self.superseded} failures superseded",
            f"{tokens} tokens ({self.prompt_tokens} of prompts, {self.output_tokens} of outputs), "
            f"{self.token_bytes / max(tokens, 1):.3f} bytes a token in their columns",
        ]
        if self.exclusions:
            lines.append(f"{self.discarded} of the rows are discarded, by {len(self.exclusions)} lists of exclusions:")
            lines += [f"    {each.rows} rows where {each.where}: {each.reason}" for each in self.exclusions]
        if self.gap:
            lines.append(f"{self.gap} records were deleted from the topic before they could be committed")
        if self.rerendered is not None:
            lines.append(f"{self.rerendered} prompts rendered again and compared")
        lines += [part.text() for part in (self.drift, self.accounts) if part is not None]
        lines.append("nothing is wrong" if self.ok else f"{self.problem_count} problems")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"

"""The judge: takes the evidence and says what is wrong with it. Imports nothing of the services; pure.

- prompts: every line that was written became one prompt, no record id stands on the topic twice;
- once: prompts = rows and failures, no id is in two rows, a failure beside a row is marked superseded; no prompt is
  given up, as none of the faults is a reason to;
- chain: the shards of a partition tile [0, end), and every file that has a shard's name can be read;
- exact: a row is the prompt on the topic plus what an engine logged for the row's last rid;
- paid once: a generation is repeated only if the one before gave nothing (and something was done to the system, or a
  fault was asked for), or if it ended and no commit covered it yet when something was done. In sum, no more than was in
  flight or uncommitted at each disturbance, plus the faults.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from tests.chaos.facts import Commit, Event, Evidence, Generation, Prompt, Shard

# From a commit on the broker's clock to the work it stands for: a request on its way, a log line being written.
SLACK_SECONDS = 1.5
# A pause, or a broker away, is over when everybody has noticed.
NOTICE_SECONDS = 15.0
COMMIT_SECONDS = 1.0


class Verdict(NamedTuple):
    """What is wrong (nothing, it is hoped) and what was counted."""

    problems: list[str]
    counts: dict[str, int]


def judge(evidence: Evidence) -> Verdict:
    """All checks."""
    counts: dict[str, int] = {}
    problems = [
        *_prompts(evidence, counts),
        *_once(evidence, counts),
        *_chains(evidence),
        *_exact(evidence),
        *_paid_once(evidence, counts),
    ]
    return Verdict(problems, counts)


def _prompts(evidence: Evidence, counts: dict[str, int]) -> Iterator[str]:
    written, published = Counter(evidence.lines), Counter(prompt.text for prompt in evidence.prompts)
    counts["lines"], counts["prompts"] = written.total(), published.total()
    yield from (f"line {text!r} became {published[text]} prompts" for text in written if published[text] != 1)
    yield from (f"prompt {text!r} was never asked for" for text in published if text not in written)
    ids = Counter(prompt.id for prompt in evidence.prompts)
    yield from (f"{id} stands {count} times on the prompts topic" for id, count in ids.items() if count > 1)


def _once(evidence: Evidence, counts: dict[str, int]) -> Iterator[str]:
    rows = Counter(row["id"] for shard in evidence.shards for row in shard.rows)
    reasons = {id: reason for shard in evidence.shards for id, reason in shard.failures}
    failures = reasons.keys()
    superseded = {id for shard in evidence.shards for id in shard.superseded}
    asked = {prompt.id for prompt in evidence.prompts}
    counts["rows"], counts["failures"] = rows.total(), len(failures - rows.keys())
    yield from (f"{id} is in {count} rows" for id, count in rows.items() if count > 1)
    yield from (f"{id} was lost: neither a row nor a failure" for id in sorted(asked - rows.keys() - failures))
    yield from (f"{id} is in the dataset, but was never asked for" for id in sorted((rows.keys() | failures) - asked))
    yield from (
        f"{id} is a row and a failure, but not marked superseded"
        for id in sorted((rows.keys() & failures) - superseded)
    )
    yield from (f"{id} is marked superseded, but is no row" for id in sorted(superseded - rows.keys()))
    yield from (f"{id} was given up: {reasons[id]}" for id in sorted(failures - rows.keys()))


def _chains(evidence: Evidence) -> Iterator[str]:
    yield from (f"not readable: {damage}" for damage in evidence.damaged)
    chains: defaultdict[int, list[Shard]] = defaultdict(list)
    for shard in evidence.shards:
        chains[shard.partition].append(shard)
    for shards in chains.values():
        end = 0
        for shard in shards:
            if shard.start != end or f"{shard.start:020d}.parquet" not in shard.name:
                yield f"{shard.name} begins at {shard.start}, the one before it ends at {end}"
            end = shard.end
            outside = [row["id"] for row in shard.rows if not shard.start <= row["kafka_offset"] < shard.end]
            yield from (f"{shard.name} holds {id} from outside of its range" for id in outside)


def _exact(evidence: Evidence) -> Iterator[str]:
    made = {generation.rid: generation for generation in evidence.generations}
    prompts = {prompt.id: prompt for prompt in evidence.prompts}
    for shard in evidence.shards:
        for row in shard.rows:
            rid = row["rids"][-1]
            generation, prompt = made.get(rid), prompts.get(row["id"])
            if generation is None or generation.ended is None:
                yield f"{row['id']}: no engine has logged an end of its request {rid}"
            elif tuple(row["input_ids"]) != generation.input_ids + generation.output_ids:
                yield f"{row['id']}: its ids are not what the engine logged for {rid}"
            elif prompt and tuple(row["input_ids"][: row["prompt_length"]]) != prompt.prompt_ids:
                yield f"{row['id']}: it does not begin with the ids of its prompt"


def _paid_once(evidence: Evidence, counts: dict[str, int]) -> Iterator[str]:
    by_ids = {prompt.prompt_ids: prompt for prompt in evidence.prompts}
    generations: defaultdict[tuple[int, ...], list[Generation]] = defaultdict(list)
    for generation in evidence.generations:
        generations[generation.input_ids].append(generation)
    commits: defaultdict[int, list[Commit]] = defaultdict(list)
    for commit in evidence.commits:
        commits[commit.partition].append(commit)
    rids = Counter(generation.rid for generation in evidence.generations)
    yield from (f"engines were asked {count} times as {rid}" for rid, count in rids.items() if count > 1)
    kills = sum(event.kind == "kill" and event.target.startswith("engine") for event in evidence.events)
    if evidence.torn > kills:
        yield f"{evidence.torn} lines of engines' logs are not readable, engines were killed {kills} times"
    excuses: Counter[str] = Counter()
    for asked, made in generations.items():
        prompt = by_ids.get(asked)
        if prompt is None:
            yield f"an engine was asked for ids that are no prompt: rid {made[0].rid}"
            continue
        for before, again in pairwise(made):
            excuse = _excuse(before, again, prompt, commits[prompt.partition], evidence.events)
            if excuse is None:
                yield f"{prompt.id} was paid for again without a reason: {before.rid}, then {again.rid}"
            excuses[excuse or "none"] += 1
    counts |= {f"repeated, {excuse}": count for excuse, count in excuses.items()}
    counts["generations"] = len(evidence.generations)
    counts["bound"] = _bound(evidence, len(generations))
    if counts["generations"] > counts["bound"]:
        yield f"{counts['generations']} generations were started, more than the {counts['bound']} that faults explain"


def _excuse(
    before: Generation, again: Generation, prompt: Prompt, commits: list[Commit], events: list[Event]
) -> str | None:
    """Why a prompt may have been generated again; None: it may not."""
    if before.spoilt:
        return "a fault was asked for"
    disturbed = _disturbed(events, before.started, again.started)
    if before.gave_nothing:
        return "it was in flight" if disturbed else None
    covered = next((c.at for c in commits if c.covers(prompt.offset)), None)
    if covered is None or again.started < covered + SLACK_SECONDS:
        return "it was not committed" if disturbed else None
    # A generator that was frozen with the prompt in hand asks before it learns that it is late; an engine that was
    # frozen begins with what came in meanwhile, before it sees that nobody waits for it any more.
    frozen = any(
        event.kind == "freeze"
        and event.at <= covered + SLACK_SECONDS
        and event.at <= again.started <= event.until + NOTICE_SECONDS
        for event in events
    )
    return "somebody was frozen" if frozen else None


def _disturbed(events: list[Event], begin: float, end: float) -> bool:
    return any(
        event.at <= end + SLACK_SECONDS and event.until + NOTICE_SECONDS >= begin
        for event in events
        if _concerns_generators(event)
    )


def _concerns_generators(event: Event) -> bool:
    return not event.target.startswith(("ingest", "sink"))


def _bound(evidence: Evidence, prompts: int) -> int:
    """Generations that can be explained: each prompt once, and again what was lost at each disturbance."""
    starts = sorted(generation.started for generation in evidence.generations if generation.ended is not None)
    ends = sorted(generation.ended for generation in evidence.generations if generation.ended is not None)
    never = sum(generation.ended is None for generation in evidence.generations)
    committed = sorted(commit.at for commit in evidence.commits)
    disturbing = [event for event in evidence.events if _concerns_generators(event)]
    total = prompts + sum(generation.spoilt for generation in evidence.generations) + never
    for event in disturbing:
        in_flight = bisect_right(starts, event.at) - bisect_right(ends, event.at)
        index = bisect_left(committed, event.at)
        last = committed[index - 1] if index else 0.0
        since = min(last, event.at - COMMIT_SECONDS) - SLACK_SECONDS
        total += in_flight + bisect_right(ends, event.at) - bisect_right(ends, since)
    return total

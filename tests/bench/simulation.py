"""N generators over M engines as a discrete-event simulation: places in use, queues, work that is done again.

The windows and the offset trackers are the product's own; engines, Kafka and time are simulated. What it leaves out:
CPU, networks beyond a delay, engines whose speed depends on their load.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Generator as Events
from typing import Any

import msgspec
import simpy

from services.generator.window import Load, Window
from services.kernel.watermark import Tracker

HOP_SECONDS = 0.01
"""From an answer to the next request in the freed place, and from a request to the engine."""
PUBLISH_SECONDS = 0.03
COMMIT_SECONDS = 1.0
LOOK_SECONDS = 0.5
REBALANCE_SECONDS = 2.0
_FIRST_WINDOW = 16
_MOST = 2048


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated. `kills` are seconds at which one generator dies (kill -9); it is missed after
    `session_seconds`, and starts again after `restart_seconds`. `scale` is (second, generators) from then on."""

    generators: int
    engines: int
    places: int
    partitions: int
    median: float
    sigma: float
    seconds: float
    warm_up: float = 15.0
    kills: tuple[float, ...] = ()
    session_seconds: float = 30.0
    restart_seconds: float = 60.0
    scale: tuple[tuple[float, int], ...] = ()
    seed: int = 1


class Result(msgspec.Struct, kw_only=True):
    """Shares of places; `again` counts records asked for more than once, `lost_share` is the time of places that ended
    without an outcome or with one too many, `behind` by how much of it the slowest partition is behind the mean one."""

    in_use: float = 0.0
    waiting: float = 0.0
    done: int = 0
    again: int = 0
    lost_share: float = 0.0
    behind: float = 0.0


class Request:
    """A record on its way to an outcome."""

    def __init__(self, owner: Generator, partition: int, offset: int) -> None:
        self.owner, self.partition, self.offset = owner, partition, offset
        self.engine: Engine | None = None
        self.service: simpy.Process | None = None
        self.gone = False


class Engine:
    """Places, and a queue before them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.queue = fleet, deque[Request]()
        self.running: set[Request] = set()

    def ask(self, request: Request) -> None:
        """A request arrives."""
        if not request.gone:
            self.queue.append(request)
            self._serve()

    def drop(self, request: Request) -> None:
        """The client closed the connection."""
        if request in self.running and request.service:
            request.service.interrupt()
        elif request in self.queue:
            self.queue.remove(request)

    def _serve(self) -> None:
        while self.queue and len(self.running) < self.fleet.case.places:
            request = self.queue.popleft()
            self.running.add(request)
            request.service = self.fleet.env.process(self._service(request))

    def _service(self, request: Request) -> Events[simpy.Event, Any, None]:
        case, began = self.fleet.case, self.fleet.env.now
        try:
            yield self.fleet.env.timeout(self.fleet.random.lognormvariate(math.log(case.median), case.sigma))
        except simpy.Interrupt:
            self.fleet.wasted(self.fleet.env.now - began)
        else:
            self.fleet.after(HOP_SECONDS / 2, lambda: request.owner.answered(request, self.fleet.env.now - began))
        self.running.discard(request)
        self._serve()


class Generator:
    """One process: what it owns, what it has in flight, a window for each engine."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.alive = fleet, True
        self.trackers: dict[int, Tracker] = {}
        self.turn: deque[int] = deque()
        self.waiting: deque[Request] = deque()
        self.in_flight: dict[Engine, set[Request]] = {engine: set() for engine in fleet.engines}
        self.windows = {engine: Window(_FIRST_WINDOW, _MOST, fleet.random.uniform) for engine in fleet.engines}
        fleet.env.process(self._look())
        fleet.env.process(self._commit())

    def fill(self) -> None:
        """Take records up to twice what engines hold, and send what has a place."""
        room = 2 * sum(window.limit for window in self.windows.values()) - self._held
        dry = 0
        while room > 0 and dry < len(self.turn):
            request = self._take(self.turn[0])
            self.turn.rotate(-1)
            dry = 0 if request else dry + 1
            if request:
                self.waiting.append(request)
                room -= 1
        while self.waiting:
            free = [each for each in self.in_flight if len(self.in_flight[each]) < self.windows[each].limit]
            if not free:
                return
            engine, request = min(free, key=lambda each: len(self.in_flight[each])), self.waiting.popleft()
            request.engine = engine
            self.in_flight[engine].add(request)
            self.fleet.count(request)
            self.fleet.after(HOP_SECONDS / 2, lambda engine=engine, request=request: engine.ask(request))

    def answered(self, request: Request, seconds: float) -> None:
        """The engine gave an output."""
        if request.gone:
            self.fleet.wasted(seconds)
            return
        assert request.engine
        self.in_flight[request.engine].discard(request)
        self.fleet.after(PUBLISH_SECONDS, lambda: self._published(request, seconds))
        self.fill()

    def _published(self, request: Request, seconds: float) -> None:
        self.fleet.outcome(request, seconds)
        if self.alive and request.partition in self.trackers:
            self.trackers[request.partition].done(request.offset)

    def give_up(self, partitions: set[int], *, commit: bool) -> None:
        """Partitions went away, after a last commit unless this process is dead."""
        if commit:
            self.commit()
        self.waiting = deque(request for request in self.waiting if request.partition not in partitions)
        for engine, requests in self.in_flight.items():
            for request in [each for each in requests if each.partition in partitions]:
                requests.discard(request)
                request.gone = True
                self.fleet.after(HOP_SECONDS / 2, lambda engine=engine, request=request: engine.drop(request))
        for partition in partitions & self.trackers.keys():
            del self.trackers[partition]
        self.turn = deque(self.trackers)

    def commit(self) -> None:
        """Offsets and what is done beyond them."""
        for partition, tracker in self.trackers.items():
            self.fleet.committed[partition] = tracker.watermark, tracker.metadata()

    @property
    def _held(self) -> int:
        return len(self.waiting) + sum(map(len, self.in_flight.values()))

    def _take(self, partition: int) -> Request | None:
        tracker = self.trackers[partition]
        # Below `high` lie those another member left unfinished; a new tracker begins with them.
        while tracker.room_for(offset := self.fleet.positions[partition]):
            self.fleet.positions[partition] += 1
            if tracker.deliver(offset):
                return Request(self, partition, offset)
        return None

    def _look(self) -> Events[simpy.Event, Any, None]:
        while self.alive:
            yield self.fleet.env.timeout(LOOK_SECONDS * self.fleet.random.uniform(0.8, 1.2))
            for engine, window in self.windows.items():
                load = Load(len(engine.running), len(engine.queue), 0.5, 0)
                window.update(self.fleet.env.now, load, len(self.in_flight[engine]))
            self.fill()

    def _commit(self) -> Events[simpy.Event, Any, None]:
        while self.alive:
            yield self.fleet.env.timeout(COMMIT_SECONDS)
            if self.alive:
                self.commit()


class Fleet:
    """Everything, and the group that spreads partitions over generators."""

    def __init__(self, case: Case) -> None:
        self.case, self.env, self.random = case, simpy.Environment(), random.Random(case.seed)
        self.engines = [Engine(self) for _ in range(case.engines)]
        self.committed: dict[int, tuple[int, str]] = dict.fromkeys(range(case.partitions), (0, ""))
        self.positions = dict.fromkeys(self.committed, 0)
        self.generators = [Generator(self) for _ in range(case.generators)]
        self.result = Result()
        self._asked: set[tuple[int, int]] = set()
        self._outcomes: set[tuple[int, int]] = set()
        self._lost = self._busy = self._crowd = 0.0
        self._rebalance(0.0)
        self.env.process(self._watch())
        for second in case.kills:
            self.env.process(self._kill(second))
        for second, generators in case.scale:
            self.after(second, lambda generators=generators: self._scale(generators))

    def run(self) -> Result:
        """To the end of the case."""
        self.env.run(self.case.seconds)
        looks = max(1.0, (self.case.seconds - self.case.warm_up) * 10)
        places = self.case.engines * self.case.places
        self.result.in_use = self._busy / looks / places
        self.result.waiting = self._crowd / max(1.0, self._busy)
        self.result.done = len(self._outcomes)
        done = Counter(partition for partition, _ in self._outcomes)
        self.result.behind = 1 - min(done[each] for each in self.committed) * len(self.committed) / max(1, done.total())
        self.result.lost_share = self._lost / (self.case.seconds * places)
        return self.result

    def after(self, seconds: float, what: Any) -> None:
        """Do it then."""

        def wait() -> Events[simpy.Event, Any, None]:
            yield self.env.timeout(seconds)
            what()

        self.env.process(wait())

    def count(self, request: Request) -> None:
        """A record is sent to an engine."""
        key = request.partition, request.offset
        self.result.again += key in self._asked
        self._asked.add(key)

    def outcome(self, request: Request, seconds: float) -> None:
        """A record has one (more)."""
        key = request.partition, request.offset
        if key in self._outcomes:
            self.wasted(seconds)
        self._outcomes.add(key)

    def wasted(self, seconds: float) -> None:
        """A place was used for nothing."""
        self._lost += seconds

    def _watch(self) -> Events[simpy.Event, Any, None]:
        yield self.env.timeout(self.case.warm_up)
        while True:
            self._busy += sum(len(engine.running) for engine in self.engines)
            self._crowd += sum(len(engine.queue) for engine in self.engines)
            yield self.env.timeout(0.1)

    def _kill(self, second: float) -> Events[simpy.Event, Any, None]:
        yield self.env.timeout(second)
        victim = self.generators.pop(0)
        victim.alive = False
        partitions = set(victim.trackers)
        victim.give_up(partitions, commit=False)
        back = min(self.case.restart_seconds, self.case.session_seconds)
        yield self.env.timeout(back)
        if self.case.restart_seconds > self.case.session_seconds:
            self._rebalance(REBALANCE_SECONDS)
            yield self.env.timeout(self.case.restart_seconds - back)
        self.generators.append(Generator(self))
        self._rebalance(REBALANCE_SECONDS)

    def _scale(self, generators: int) -> None:
        while len(self.generators) > generators:
            leaving = self.generators.pop()
            leaving.alive = False
            leaving.give_up(set(leaving.trackers), commit=True)
        while len(self.generators) < generators:
            self.generators.append(Generator(self))
        self._rebalance(REBALANCE_SECONDS)

    def _rebalance(self, seconds: float) -> None:
        """Sticky: everybody keeps what is within its share; the rest moves, and is read again from the commit."""
        share = -(-self.case.partitions // len(self.generators))
        for generator in self.generators:
            generator.commit()
            generator.give_up({*sorted(generator.trackers)[share:]}, commit=False)
        owned = {partition for generator in self.generators for partition in generator.trackers}
        free = deque(partition for partition in self.committed if partition not in owned)

        def assign() -> None:
            for generator in self.generators:
                while free and len(generator.trackers) < share:
                    partition = free.popleft()
                    tracker = Tracker.restore(*self.committed[partition])
                    generator.trackers[partition] = tracker
                    generator.turn.append(partition)
                    self.positions[partition] = tracker.watermark
                generator.fill()

        self.after(seconds, assign)


def simulate(case: Case) -> Result:
    """Run one case."""
    return Fleet(case).run()

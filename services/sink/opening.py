"""From TOKENHAUL_SINK_ROOT to a store that a dataset can be written into. What may pass is waited for; what cannot is a
wrong setting."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from schemas.control import Dataset
from services.kernel.errors import Fatal, Refused, Retry, SettingsError
from services.kernel.masking import masked
from services.kernel.objects import open_store
from services.kernel.retry import Backoff
from services.kernel.store import Store, prove
from services.sink.chain import claim
from services.sink.metrics import SinkMetrics

log = logging.getLogger("tokenhaul.sink")


async def proven(root: str, metrics: SinkMetrics) -> Store:
    """The store at `root`, once it has answered. Raises SettingsError for one that cannot be used."""
    try:
        store = open_store(root)
        await _patiently(lambda: _try_out(store), f"the store at {root} gives no answer", metrics)
    except (Fatal, Refused) as error:
        raise SettingsError(f"TOKENHAUL_SINK_ROOT={masked(root)!r} is not usable: {error}") from error
    return store


async def claimed(store: Store, dataset: Dataset, metrics: SinkMetrics) -> None:
    """See `claim`. The store has proved itself: what it refuses now will pass."""
    await _patiently(lambda: claim(store, dataset), "the dataset cannot be claimed", metrics, refusals=True)


def _try_out(store: Store) -> None:
    prove(store)
    store.sweep()


async def _patiently(work: Callable[[], None], trouble: str, metrics: SinkMetrics, *, refusals: bool = False) -> None:
    """Do `work` until it works. Raises what will not pass: Refused too, unless `refusals` may."""
    backoff = Backoff(base=0.5, cap=15.0)
    while True:
        try:
            return await _aside(work)
        except Retry as retry:
            if isinstance(retry, Refused) and not refusals:
                raise
            metrics.retried(retry.cause)
            wait = backoff.next()
            log.warning("%s (%s); trying again in %.1f s", trouble, retry, wait, extra={"action": "store_wait"})
        await asyncio.sleep(wait)


async def _aside(work: Callable[[], None]) -> None:
    """Do `work` in a thread that nobody waits for once this is cancelled: a request that hangs must not hold up a stop
    (asyncio.to_thread would, at the end of the loop)."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="store", daemon=True).start()
    await asyncio.wrap_future(done)

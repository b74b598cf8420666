"""What people tell ingest through the control topic: only ingest publishes prompts."""

from __future__ import annotations

from services.ingest import regenerate, replay
from services.ingest.ledger import Ledger
from services.kernel.control import ControlView
from services.kernel.kafka import Kafka
from services.kernel.lifecycle import Context


async def apply(context: Context, kafka: Kafka, ledger: Ledger, commands: ControlView) -> None:
    """Carry out every command that waits, each once, whatever is killed meanwhile. Raises as Ledger.publish does."""
    ledger.make_way(commands)
    await regenerate.apply(context, kafka, ledger, commands)
    await replay.apply(context, kafka, ledger, commands)

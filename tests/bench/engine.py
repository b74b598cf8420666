"""An engine that costs next to nothing: a canned answer, at once or after a log-normal time in one of some places.

    python -m tests.bench.engine --port 30001 [--places 64 --median 0.4 --sigma 1.2]

POST /places with a number changes how many places there are; GET /asked tells how many requests came, for which
records, and the seconds of places that ended because the client went away. It is spoken to over keep-alive connections
by clients that wait for each answer: the little of HTTP that takes is done by hand, because a web framework would cost
as much as the generator that is to be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
from collections import deque

OUTPUT_IDS = 200
_FIELDS = re.compile(rb'"rid": ?"([^"]*)", ?"input_ids": ?\[([^]]*)\]')


class Places:
    """Who may be served now. `used` and `open` add up seconds of places, for the share that was busy."""

    def __init__(self, count: int, median: float, sigma: float, output_ids: int = OUTPUT_IDS) -> None:
        self.output_ids = output_ids
        # As uneven as the ids of a text, and as little repeated: what writes them has to compress them.
        ids = [min(49_000, int(random.Random(n).expovariate(1 / 5000))) + 3 for n in range(output_ids - 1)]
        self.ids = ",".join(map(str, [*ids, 2]))
        self.count, self._median, self._sigma = count, median, sigma
        self._random = random.Random(1)
        self._queue: deque[Connection] = deque()
        self._serving: dict[Connection, tuple[float, asyncio.TimerHandle]] = {}
        self.records: set[bytes] = set()
        self.asked = 0
        self.lost_seconds = 0.0

    @property
    def running(self) -> int:
        """Requests in a place."""
        return len(self._serving)

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._queue)

    def ask(self, connection: Connection, record: bytes) -> None:
        """Serve a request as soon as there is a place for it."""
        self.asked += 1
        self.records.add(record)
        if not self._median:
            connection.answer()
            return
        self._queue.append(connection)
        self._serve()

    def leave(self, connection: Connection) -> None:
        """The client is gone: so is its request."""
        if connection in self._serving:
            began, timer = self._serving.pop(connection)
            timer.cancel()
            self.lost_seconds += asyncio.get_running_loop().time() - began
            self._serve()
        elif connection in self._queue:
            self._queue.remove(connection)

    def set(self, count: int) -> None:
        """There are `count` places from now on."""
        self.count = count
        self._serve()

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and self.running < self.count:
            connection = self._queue.popleft()
            seconds = self._random.lognormvariate(math.log(self._median), self._sigma)
            self._serving[connection] = loop.time(), loop.call_later(seconds, self._done, connection)

    def _done(self, connection: Connection) -> None:
        del self._serving[connection]
        connection.answer()
        self._serve()


class Connection(asyncio.Protocol):
    """One client, which sends its next request after the answer to the last."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._read = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._places.leave(self)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        if len(body) < length:
            return
        self._read, self._body = b"", body
        self._route(lines[0].split(b" ")[1])

    def _route(self, path: bytes) -> None:
        if path == b"/generate":
            fields = _FIELDS.search(self._body)
            assert fields, "rid and input_ids, in this order"
            self._rid, self._prompt_tokens = fields[1], fields[2].count(b",") + 1
            if self._rid.startswith(b"check"):  # whether there are output_ids: nothing that is counted
                self.answer()
            else:
                self._places.ask(self, self._rid.partition(b"-")[0])
        elif path == b"/asked":
            places = self._places
            records = [record.decode() for record in places.records]
            told = {"asked": places.asked, "records": records, "lost_seconds": places.lost_seconds}
            self._send(json.dumps(told).encode())
        elif path == b"/v1/loads":
            running, waiting = self._places.running, self._places.waiting
            load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": 0.5}
            self._send(json.dumps({"loads": [load]}).encode())
        elif path == b"/get_model_info":
            self._send(b'{"model_path": "fake", "weight_version": "default"}')
        elif path == b"/places":
            self._places.set(int(self._body))
            self._send(b"{}")
        elif path in (b"/ready", b"/health"):
            self._send(b"{}")
        else:
            self._send(b"{}", b"404 Not Found")

    def answer(self) -> None:
        """What every request is answered."""
        text = (
            f'{{"text":"","output_ids":[{self._places.ids}],"meta_info":{{"id":"{self._rid.decode()}","finish_reason":{{"type":"stop","matched":2}},'
            f'"prompt_tokens":{self._prompt_tokens},"completion_tokens":{self._places.output_ids},"weight_version":"default"}}}}'
        )
        self._send(text.encode())

    def _send(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        self._transport.write(head + body)


async def _main(args: argparse.Namespace) -> None:
    places = Places(args.places, args.median, args.sigma, args.output)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(places), "127.0.0.1", args.port)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--median", type=float, default=0.0)
    parser.add_argument("--sigma", type=float, default=1.2)
    parser.add_argument("--output", type=int, default=OUTPUT_IDS, help="ids of an answer")
    asyncio.run(_main(parser.parse_args()))

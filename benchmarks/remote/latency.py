"""Run a TCP proxy that delays each byte of a loopback server by a given time, each way.

    python benchmarks/remote/latency.py TARGET_PORT MILLISECONDS [MB_PER_SECOND_OF_A_CONNECTION]

Prints its own port. Runs in a separate process, so that it does not slow the measured interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

PIECE = 256 << 10


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, rate: float) -> None:
    """Forward bytes `delay` seconds later, at most `rate` bytes per second."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

    async def deliver() -> None:
        free = 0.0
        while True:
            due, data = await queue.get()
            due = max(due, free)
            free = due + len(data) / rate
            wait = due - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            if not data:
                return
            writer.write(data)
            await writer.drain()

    task = asyncio.create_task(deliver())
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(PIECE):
            await queue.put((time.monotonic() + delay, data))
    await queue.put((time.monotonic() + delay, b""))
    with contextlib.suppress(ConnectionError):
        await task
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.close()


async def main(target: int, delay: float, rate: float) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", target, limit=4 * PIECE)
        await asyncio.gather(carry(reader, back, delay, rate), carry(there, writer, delay, rate))

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=4 * PIECE)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        main(int(sys.argv[1]), float(sys.argv[2]) / 1000, float(sys.argv[3]) * 1e6 if len(sys.argv) > 3 else 1e12)
    )

"""A proxy between an S3 client and a server that makes the network and the store go wrong on demand.

Requests are passed on byte for byte with their own Host header, so signatures stay valid.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web
from yarl import URL

_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "upgrade"}
    | {"transfer-encoding"}
)
_ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>injected: {code}</Message>'
    "<RequestId>CHAOS</RequestId></Error>"
)


@dataclass
class Rule:
    """What happens to the requests that match; the first rule that is not used up wins.

    Actions: ``status`` (the server is not asked), ``reset``, ``drop_response`` (the server did it, then a reset),
    ``blackhole`` (taken, never answered), ``truncate`` (half the body, then a reset), ``corrupt`` (one bit of the body
    at `offset`), ``corrupt_upload`` (the same on the way there), ``stale`` (what the same GET was answered last),
    ``missing`` (the listing leaves out what `pattern` matches).
    """

    action: str
    method: str = ".*"
    path: str = ""
    query: str = ""
    times: int = 1 << 60
    after: int = 0
    every: int = 1
    status: int = 503
    code: str = "SlowDown"
    offset: int = 0
    pattern: str = ""
    seen: int = 0
    hits: int = 0

    def takes(self, request: web.Request) -> bool:
        """Whether this request is one of its hits."""
        if not re.fullmatch(self.method, request.method) or not re.search(self.path, request.path):
            return False
        if not re.search(self.query, request.query_string):
            return False
        self.seen += 1
        if self.seen <= self.after or self.hits >= self.times or (self.seen - self.after) % self.every:
            return False
        self.hits += 1
        return True


class ChaosProxy:
    """Runs in a thread of its own while it is entered."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.log: list[tuple[str, str]] = []
        """Method and path with query of every request."""
        self.url = ""
        self._last: dict[tuple[str, str], tuple[int, Any, bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> ChaosProxy:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *args: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        connector = TCPConnector(limit=0)
        self._session = ClientSession(connector=connector, timeout=ClientTimeout(total=None), auto_decompress=False)
        application = web.Application(client_max_size=1 << 40)
        application.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, auto_decompress=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]  # in black holes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _rule(self, request: web.Request) -> Rule | None:
        return next((rule for rule in self.rules if rule.takes(request)), None)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.log.append((request.method, request.path_qs))
        rule = self._rule(request)
        action = rule.action if rule is not None else ""
        if action == "reset":
            return _reset(request)
        if rule is not None and action == "status":
            await _drain(request)
            text = b"" if request.method == "HEAD" else _ERROR.format(code=rule.code).encode()
            return web.Response(status=rule.status, body=text, headers={"Content-Type": "application/xml"})
        if action == "blackhole":
            await _drain(request)
            await asyncio.Event().wait()
        known = (request.method, request.path_qs)
        if action == "stale" and known in self._last:
            status, headers, body = self._last[known]
            return web.Response(status=status, headers=headers, body=body)
        return await self._pass_on(request, rule)

    async def _pass_on(self, request: web.Request, rule: Rule | None) -> web.StreamResponse:
        action = rule.action if rule is not None else ""
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP | {"expect"}]
        body: Any = request.content.iter_chunked(1 << 18) if request.body_exists else None
        if rule is not None and action == "corrupt_upload":
            body = bytearray(await request.read())
            body[min(rule.offset, len(body) - 1)] ^= 1
            headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        skipped = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
        async with self._session.request(
            request.method, URL(self.upstream + request.raw_path, encoded=True), headers=headers, data=body,
            allow_redirects=False, skip_auto_headers=skipped,
        ) as answer:  # fmt: skip
            if action == "drop_response":
                await answer.read()
                return _reset(request)
            found = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP]
            if request.method == "HEAD" or answer.status in (204, 304):
                response = web.StreamResponse(status=answer.status, headers=found)
                await response.prepare(request)
                await response.write_eof()
                return response
            data = bytearray(await answer.read())
            found = [(name, value) for name, value in found if name.lower() != "content-length"]
            if rule is not None and action == "corrupt" and data:
                data[min(rule.offset, len(data) - 1)] ^= 1
            if rule is not None and action == "missing":
                entry = rf"<Contents>(?:(?!</Contents>).)*{rule.pattern}.*?</Contents>"
                data = bytearray(re.sub(entry.encode(), b"", data, flags=re.DOTALL))
            if action == "truncate":
                response = web.StreamResponse(
                    status=answer.status, headers=[*found, ("Content-Length", str(len(data)))]
                )
                await response.prepare(request)
                await response.write(bytes(data[: len(data) // 2]))
                return _reset(request)
            if request.method == "GET":
                self._last[request.method, request.path_qs] = (answer.status, found, bytes(data))
            return web.Response(status=answer.status, headers=found, body=bytes(data))


async def _drain(request: web.Request) -> None:
    chunks: AsyncIterator[bytes] = request.content.iter_chunked(1 << 20)
    async for _ in chunks:
        pass


def _reset(request: web.Request) -> web.Response:
    """The client sees a TCP reset, and never the response returned here."""
    transport = request.transport
    if transport is not None:
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response(status=500)

"""Frames over TCP: a msgspec header and raw KV behind it, between processes that share a run's secret.

Never pickle. A peer that does not say the secret first gets nothing; a frame that is too long or does not decode
closes its connection and is counted, and the process lives.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from collections.abc import Callable
from typing import cast

import msgspec
import numpy as np

from engines.pdd.executor.base import KVBytes
from engines.pdd.messages import AnyMessage

_LENGTHS = struct.Struct("<II")  # bytes of header, bytes of payload
MAX_HEADER_BYTES = 16 << 20  # a prompt of 4M tokens
MAX_PAYLOAD_BYTES = 64 << 20


class Hello(msgspec.Struct, frozen=True):
    """The first frame of every connection: who speaks, and on which lane (None: control)."""

    secret: str
    node: str
    lane: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_hello_decoder = msgspec.msgpack.Decoder(Hello)

OnMessage = Callable[[str, AnyMessage, KVBytes | None], None]
OnLost = Callable[[str, str], None]


class Connection(asyncio.BufferedProtocol):
    """One connection. Payloads are received straight into their own buffer, no copy."""

    def __init__(self, channels: Channels, *, peer: str | None, lane: int | None) -> None:
        self._channels = channels
        self.peer = peer
        self.lane = lane
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_LENGTHS.size)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._header_len: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        while self._filled == len(self._buffer):
            if self._header_len is None:
                header_len, payload_len = _LENGTHS.unpack(self._buffer)
                if header_len > MAX_HEADER_BYTES or payload_len > MAX_PAYLOAD_BYTES or header_len == 0:
                    self._refuse()
                    return
                self._header_len = header_len
                self._expect(header_len + payload_len)
            else:
                body, header_len = self._buffer, self._header_len
                self._header_len = None
                self._expect(_LENGTHS.size)
                if not self._take(body, header_len):
                    self._refuse()
                    return

    def _expect(self, nbytes: int) -> None:
        self._buffer = bytearray(nbytes)
        self._view = memoryview(self._buffer)
        self._filled = 0

    def _take(self, body: bytearray, header_len: int) -> bool:
        header = memoryview(body)[:header_len]
        if self.peer is None:
            return self._greet(header)
        try:
            message = _decoder.decode(header)
        except msgspec.DecodeError:
            return False
        payload = np.frombuffer(body, dtype=np.uint8, offset=header_len) if len(body) > header_len else None
        self._channels.on_message(self.peer, message, payload)
        return True

    def _greet(self, header: memoryview) -> bool:
        try:
            hello = _hello_decoder.decode(header)
        except msgspec.DecodeError:
            return False
        if not hmac.compare_digest(hello.secret.encode(), self._channels.secret.encode()):
            return False
        self.peer, self.lane = hello.node, hello.lane
        self._channels.register(self)
        return True

    def _refuse(self) -> None:
        self._channels.num_refused += 1
        if self._transport is not None:
            self._transport.abort()

    def write(self, header: bytes, payload: KVBytes | None) -> None:
        assert self._transport is not None
        nbytes = 0 if payload is None else payload.nbytes
        self._transport.write(_LENGTHS.pack(len(header), nbytes) + header)
        if payload is not None:
            self._transport.write(payload.data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._channels.forget(self, str(exc) if exc else "closed by the peer")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Channels:
    """All connections of one process, by peer and lane. `on_message(src, message, payload)` takes what comes."""

    def __init__(self, node: str, secret: str, on_message: OnMessage, on_lost: OnLost) -> None:
        self.node = node
        self.secret = secret
        self.on_message = on_message
        self._on_lost = on_lost
        self._connections: dict[tuple[str, int | None], Connection] = {}
        self._strangers: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._is_closing = False
        self.num_refused = 0
        self.num_unsent = 0

    async def listen(self, port: int = 0) -> int:
        """Listen on loopback; the port. Raises OSError when it is in use."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, "127.0.0.1", port)
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self) -> Connection:
        connection = Connection(self, peer=None, lane=None)
        self._strangers.add(connection)
        return connection

    async def connect(self, peer: str, host: str, port: int, lane: int | None = None) -> None:
        """Open the connection to `peer` (on `lane`) and say hello. Raises OSError."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Connection(self, peer=peer, lane=lane), host, port)
        connection.write(_encoder.encode(Hello(self.secret, self.node, lane)), None)
        self.register(connection)

    def register(self, connection: Connection) -> None:
        self._strangers.discard(connection)
        assert connection.peer is not None
        self._connections[connection.peer, connection.lane] = connection

    def forget(self, connection: Connection, reason: str) -> None:
        self._strangers.discard(connection)
        key = (connection.peer or "", connection.lane)
        if self._connections.get(key) is connection:
            del self._connections[key]
            if not self._is_closing:
                self._on_lost(key[0], reason)

    def send(self, dst: str, message: AnyMessage, payload: KVBytes | None = None, lane: int | None = None) -> None:
        """Write to `dst`; a peer that is gone loses the message, which is counted."""
        connection = self._connections.get((dst, lane))
        if connection is None:
            self.num_unsent += 1
            return
        connection.write(_encoder.encode(message), payload)

    async def close(self) -> None:
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in [*self._connections.values(), *self._strangers]:
            connection.close()


def encoded_bytes(message: AnyMessage) -> int:
    """What a message takes on a socket, its lengths included, its payload not."""
    return _LENGTHS.size + len(_encoder.encode(message))

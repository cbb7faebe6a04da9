"""Connections to schedulers: endpoints are tried in order, errors become Octavo's own."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

# gRPC's own fork handlers crash a child forked while an event loop uses it (seen in one fork of eight).
# Without them a child may do anything but use the client, and that is refused by the client itself.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from octavo._sdk.answers import error_info
from octavo.errors import ErrorInfo, InvalidRequestError, OctavoError, UnavailableError, error_of
from octavo.protocol.bounds import MAX_MESSAGE_BYTES
from octavo.protocol.proxy import proxy_options
from octavo.service.address import split_scheme
from octavo.service.tls import Tls, TlsFiles, tls_for
from octavo.v1 import common_pb2
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc
from octavo.v1 import operations_pb2_grpc as ops_grpc

DEFAULT_ENDPOINT: Final = "127.0.0.1:50051"
_SCHEMES: Final = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:")
_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Find a half-open connection, or a process that stands still, while requests run on it.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # A keepalive that finds another ping under way waits for that one, by default for a minute. Bandwidth
    # probes are such pings; a wide window from the start does without them.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # Each dial makes a connection of its own, and may try at once.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This one bounds a connection attempt, whatever its name.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
# The scheduler puts its `octavo.v1.Error` there, beside the google.rpc.Status that others read.
_ERROR_KEY: Final = "octavo-error-bin"
_UNREACHABLE: Final = "UNREACHABLE"
# Reasons of a call that reached no scheduler, or one that is gone: gRPC's own, and ours.
_GONE: Final = ("UNAVAILABLE", _UNREACHABLE)
_DIAL_TIMEOUT_S: Final = 5.0
# One of several that has not answered for this long is not waited for alone.
_STAGGER_S: Final = 0.3
_HEALTH_TIMEOUT_S: Final = 2.0
# A scheduler that runs says how it is within this time, however busy it is.
_STILL_S: Final = 0.75
# grpc.health.v1, without its package: an empty request asks for the server as a whole, the answer's first
# field is its state.
HEALTH_METHOD: Final = "/grpc.health.v1.Health/Check"
SERVING: Final = b"\x08\x01"
# Part of gRPC's account of a failed connection -> what a person wants to know.
_PLAIN_WORDS: Final = {
    "connection refused": "connection refused",
    "network is unreachable": "network is unreachable",
    "no route to host": "no route to host",
    "dns resolution": "no such host",
    "name resolution": "no such host",
    "certificate_verify_failed": "its certificate is by no authority of tls_ca, or not of this name",
    "socket closed": "it closed the connection: it may want TLS, or another certificate than was presented",
    "wrong_version_number": "it does not speak TLS",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Connection:
    """An open channel, and the endpoint that it leads to."""

    endpoint: str
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Goes with every call: the API key."""

    @property
    def generation(self) -> pb_grpc.GenerationAsyncStub:
        """The stub of `octavo.v1.Generation`."""
        return cast("pb_grpc.GenerationAsyncStub", pb_grpc.GenerationStub(self.channel))

    @property
    def operations(self) -> ops_grpc.OperationsAsyncStub:
        """The stub of `octavo.v1.Operations`."""
        return cast("ops_grpc.OperationsAsyncStub", ops_grpc.OperationsStub(self.channel))

    def metadata_of(self, api_key: str | None) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call for somebody with a key of their own; an empty key is none.

        Raises:
            InvalidRequestError: it cannot be sent.
        """
        if api_key is not None:
            check_api_key(api_key)
        return self.metadata if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def close(self) -> None:
        """Close the channel and end what runs on it."""
        await self.channel.close(None)


def parse_endpoints(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the endpoints of a string (separated by commas), a list, or the environment.

    Raises:
        InvalidRequestError: one of them is not `host:port`.
    """
    if given is None:
        given = os.environ.get("OCTAVO_ENDPOINT") or DEFAULT_ENDPOINT
    parts = given.split(",") if isinstance(given, str) else list(given)
    endpoints = tuple(_endpoint(part.strip()) for part in parts if part.strip())
    if not endpoints:
        raise InvalidRequestError.of_fields(("endpoint", "must name at least one host:port"))
    return endpoints


def _endpoint(text: str) -> str:
    _, place = split_scheme(text)
    scheme = text[: text.index(place)] if place else ""
    if place.startswith(_SCHEMES):
        return text
    host, colon, port = place.rpartition(":")
    if not colon or (place.startswith("[") and place.endswith("]")):
        host, port = place, DEFAULT_ENDPOINT.rpartition(":")[2]
    if "/" in place or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequestError.of_fields(("endpoint", f"must be host:port, got {text!r}"))
    return f"{scheme}{host}:{port}"


def parse_tls(given: Tls | None) -> Tls | None:
    """Return how to connect: as was given, or as the environment says, if it does.

    Raises:
        InvalidRequestError: a file cannot be used.
    """
    tls = given or Tls.from_environment()
    if tls is not None:
        try:
            tls.check()
        except (OSError, ValueError) as error:
            raise InvalidRequestError.of_fields(("tls", str(error))) from None
    return tls


def _target(endpoint: str) -> str:
    return split_scheme(endpoint)[1]


def parse_api_key(given: str | None) -> str | None:
    """Return the key to call with: what was given, or what is in the environment, if there is one.

    Raises:
        InvalidRequestError: it cannot be sent; it is not repeated.
    """
    key = os.environ.get("OCTAVO_API_KEY") if given is None else given
    key = key.strip() if key is not None else ""
    check_api_key(key)
    return key or None


def check_api_key(key: str) -> None:
    """Raise InvalidRequestError for a key that gRPC cannot carry."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequestError.of_fields(("api_key", "must be one word of printable ASCII characters"))


class Endpoints:
    """Schedulers in order of preference; one that failed goes to the end of the line."""

    def __init__(self, endpoints: Sequence[str], api_key: str | None = None, tls: Tls | None = None) -> None:
        self._order = list(endpoints)
        self._tls = tls
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        self._unary: Connection | None = None
        self._users: Counter[Connection] = Counter()
        """Calls in flight on each connection for unary calls."""

    def __len__(self) -> int:
        return len(self._order)

    def demote(self, endpoint: str) -> None:
        """Prefer the others from now on."""
        self._order.remove(endpoint)
        self._order.append(endpoint)

    def prefer(self, endpoint: str) -> bool:
        """Prefer an endpoint from now on, and return whether it is one of ours; others are never called."""
        ours = next((one for one in self._order if _target(one) == _target(endpoint)), None)
        if ours is None:
            return False
        self._order.remove(ours)
        self._order.insert(0, ours)
        return True

    async def dial(self) -> Connection:
        """Connect to the first endpoint that serves or, where none does, to the first that can be reached.

        Each is tried once. One that is slow to answer holds up the next for a moment only.

        Raises:
            UnavailableError: none can be reached; says why for each.
        """
        waiting, failures = list(self._order), list[str]()
        attempts: dict[asyncio.Task[tuple[Connection, bool]], str] = {}
        idle: dict[str, Connection] = {}
        chosen: Connection | None = None
        try:
            while chosen is None and (waiting or attempts):
                if waiting:
                    endpoint = waiting.pop(0)
                    attempts[asyncio.create_task(self._try(endpoint))] = endpoint
                timeout_s = _STAGGER_S if waiting or idle else None
                done, _ = await asyncio.wait(attempts, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    endpoint = attempts.pop(task)
                    try:
                        connection, serves = task.result()
                    except UnavailableError as error:
                        failures.append(error.message)
                        self.demote(endpoint)
                        continue
                    if serves and chosen is None:
                        chosen = connection
                    else:
                        idle[endpoint] = connection
                if not done and not waiting and idle:
                    break
            if chosen is None and idle:
                chosen = idle.pop(next(endpoint for endpoint in self._order if endpoint in idle))
        finally:
            await self._abandon(attempts, idle.values())
        if chosen is None:
            raise UnavailableError("; ".join(failures), ErrorInfo(_UNREACHABLE, "", 14))
        return chosen

    async def _try(self, endpoint: str) -> tuple[Connection, bool]:
        """Connect, and return whether the scheduler serves; the only one there is need not be asked."""
        connection = await self._dial(endpoint)
        return connection, len(self._order) == 1 or await _serves(connection)

    @staticmethod
    async def _abandon(
        attempts: Iterable[asyncio.Task[tuple[Connection, bool]]], idle: Iterable[Connection]
    ) -> None:
        """Close what was tried and not chosen."""
        connections = list(idle)
        for task in attempts:
            task.cancel()
        for outcome in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(outcome, tuple):
                connections.append(outcome[0])
        for connection in connections:
            await connection.close()

    async def unary(self, call: Callable[[Connection], Awaitable[_T]], timeout_s: float) -> _T:
        """Make a call that may safely be made again; moves on from endpoints that are gone.

        A connection may take longer than that to show that it is gone: then the others are still tried.

        Raises:
            OctavoError: the call failed, or nothing was reached within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        delay, attempts = 0.05, 0
        while True:
            attempts += 1
            try:
                return await self._use(self._unary or await self._keep(await self.dial()), call)
            except UnavailableError as error:
                is_late = loop.time() + delay >= give_up_at and attempts >= len(self)
                if error.reason not in _GONE or is_late:
                    raise
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)

    async def serving(self, timeout_s: float) -> bool:
        """Return whether one of them takes requests; calls go to that one from now on.

        The one that calls went to may have given its workers back to another, and answer all the same.

        Raises:
            OctavoError: the call failed, or nothing was reached within `timeout_s`.
        """
        if await self.unary(_is_serving, timeout_s):
            return True
        if len(self) == 1:
            return False
        connection = await self.dial()
        if not await _serves(connection):
            await connection.close()
            return False
        self.prefer(connection.endpoint)
        left, self._unary = self._unary, connection
        if left is not None and left not in self._users:
            await left.close()
        return True

    async def another_serves(self, endpoint: str) -> bool:
        """Return whether any but this one takes requests, as far as a moment can tell."""
        others = [self._serves_at_once(one) for one in self._order if one != endpoint]
        return any(await asyncio.gather(*others))

    async def _serves_at_once(self, endpoint: str) -> bool:
        with suppress(UnavailableError, TimeoutError):
            async with asyncio.timeout(_STILL_S):
                connection = await self._dial(endpoint)
                try:
                    return await _serves(connection)
                finally:
                    await connection.close()
        return False

    async def once(self, endpoint: str | None, call: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Make a call that must reach the scheduler that is meant, and none in its place: one attempt.

        Raises:
            InvalidRequestError: of several endpoints none was named, or it is not one of ours.
            OctavoError: the call failed, or the endpoint could not be reached.
        """
        if endpoint is not None:
            (endpoint,) = parse_endpoints([endpoint])
        meant = [one for one in self._order if endpoint is None or _target(one) == _target(endpoint)]
        if len(meant) != 1:
            problem = f"must name one of those of this client: {', '.join(sorted(self._order))}"
            raise InvalidRequestError.of_fields(("endpoint", problem))
        connection = await self._dial(meant[0])
        try:
            return await call(connection)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            await connection.close()

    async def _keep(self, connection: Connection) -> Connection:
        """Return the connection that calls share: this one, unless another call was faster to connect."""
        if self._unary is None:
            self._unary = connection
        else:
            await connection.close()
        return self._unary

    async def _use(self, connection: Connection, call: Callable[[Connection], Awaitable[_T]]) -> _T:
        """Make a call. The last to leave a connection that is not kept any more closes it."""
        self._users[connection] += 1
        try:
            return await call(connection)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
            if self._unary is connection and isinstance(error, UnavailableError) and error.reason in _GONE:
                self._unary = None
                self.demote(connection.endpoint)
            raise error from None
        finally:
            self._users[connection] -= 1
            if not self._users[connection]:
                del self._users[connection]
                if self._unary is not connection:
                    await connection.close()

    async def _dial(self, endpoint: str) -> Connection:
        tls = tls_for(endpoint, self._tls)
        try:
            files = tls.read() if tls is not None else None
        except OSError as error:
            raise UnavailableError(f"cannot reach {endpoint}: {error.filename}: {error.strerror}") from None
        return await _dial(endpoint, files, self._metadata)

    async def close(self) -> None:
        """Close the connection that `unary` keeps."""
        if self._unary is not None:
            connection, self._unary = self._unary, None
            await connection.close()


def channel_options(endpoint: str) -> list[tuple[str, int]]:
    """Return the options of a channel to a scheduler."""
    return [*_OPTIONS, *proxy_options(endpoint)]


async def _dial(endpoint: str, files: TlsFiles | None, metadata: tuple[tuple[str, str], ...]) -> Connection:
    options, target = channel_options(endpoint), _target(endpoint)
    if files is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, files.credentials(), options=options)
    connection = Connection(endpoint, channel, metadata)
    ready = False
    try:
        async with asyncio.timeout(_DIAL_TIMEOUT_S):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise UnavailableError(f"cannot reach {endpoint}: {await _why(connection)}")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
        ready = True
    except TimeoutError:
        raise UnavailableError(f"cannot reach {endpoint}: no answer within {_DIAL_TIMEOUT_S:g} s") from None
    finally:
        if not ready:
            await connection.close()
    return connection


async def _serves(connection: Connection) -> bool:
    """Return whether a scheduler takes requests: it has workers, and does not drain."""
    try:
        return await _is_serving(connection)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNIMPLEMENTED


async def stands_still(connection: Connection) -> bool:
    """Return whether a scheduler does not answer at all; one whose connection is gone has not that fault."""
    try:
        await _is_serving(connection, _STILL_S)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return False


async def _is_serving(connection: Connection, timeout_s: float = _HEALTH_TIMEOUT_S) -> bool:
    check = connection.channel.unary_unary(
        HEALTH_METHOD, request_serializer=bytes, response_deserializer=bytes
    )
    return bytes(await check(b"", timeout=timeout_s)) == SERVING


async def _why(connection: Connection) -> str:
    """Return why a channel in TRANSIENT_FAILURE failed: only a call on it can tell."""
    try:
        await connection.generation.ListModels(pb.ListModelsRequest(), timeout=1.0)
    except grpc.aio.AioRpcError as error:
        details = error.details() or "unknown"
        for known, plain in _PLAIN_WORDS.items():
            if known in details.lower():
                return plain
        return details
    return "the connection was lost"


def from_rpc(error: grpc.aio.AioRpcError) -> OctavoError:
    """Return what a failed call says, in Octavo's terms."""
    details = error.details() or ""
    code: int = error.code().value[0]
    fallback = ErrorInfo(error.code().name, details or error.code().name.lower().replace("_", " "), code)
    # Pairs at run time, whatever the stubs say.
    trailer = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    value = dict(trailer).get(_ERROR_KEY)
    if isinstance(value, bytes):
        with suppress(DecodeError):
            return error_of(error_info(common_pb2.Error.FromString(value)))
    return error_of(fallback)

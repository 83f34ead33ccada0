"""Name resolution that refuses private addresses, and so decides where a fetch may connect.

aiohttp connects only to the addresses its resolver returns, and `VettingResolver` returns an
answer only after judging each address in it. There is no second look-up between the check and the
connection, so a name that changes its answer (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address
from typing import Protocol

from aiohttp.abc import AbstractResolver, ResolveResult

from epd.errors import MediaError
from epd.media.addresses import IPAddress, parse_resolved

AddressRule = Callable[[IPAddress], bool]
"""Says whether an address may be connected to."""


class NameService(Protocol):
    """Looks names up. Tests ship a fake."""

    async def lookup(self, host: str) -> list[str]:
        """The addresses of `host`, as text.

        Raises:
            OSError: the name does not resolve.
        """
        ...

    async def close(self) -> None: ...


class SystemNameService:
    """The operating system's resolver, in threads of its own.

    A name server that does not answer holds a thread for many seconds; in the loop's default
    executor it would hold up everything else that uses one.
    """

    def __init__(self, num_threads: int = 16) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="media-dns")

    async def lookup(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _lookup_blocking, host)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup_blocking(host: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as exc:  # a label that IDNA cannot encode, such as one of 64 characters
        raise OSError("not a valid host name") from exc
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))


class VettingResolver(AbstractResolver):
    """Gives aiohttp the addresses of a name, or refuses if any of them is not allowed.

    One bad address refuses the whole answer: a name with both public and private addresses is
    either misconfigured or an attack.
    """

    def __init__(self, names: NameService, is_address_allowed: AddressRule) -> None:
        self._names = names
        self._is_address_allowed = is_address_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        results: list[ResolveResult] = []
        for text in await self._names.lookup(host):
            address = parse_resolved(text)
            self.check(address, host)
            is_v4 = isinstance(address, IPv4Address)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=socket.AF_INET if is_v4 else socket.AF_INET6,
                    proto=socket.IPPROTO_TCP,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        if not results:
            raise OSError(f"no address for {host}")
        return results

    def check(self, address: IPAddress, host: str) -> None:
        """Refuse `address`, found as or written in the URL as `host`, unless it is allowed.

        Raises:
            MediaError: it is not. The address itself is not told: it may be an inside one.
        """
        if not self._is_address_allowed(address):
            raise MediaError(
                f"images are not fetched from {host}: its address is not public. Send a public "
                "URL or a data URL"
            )

    async def close(self) -> None:
        await self._names.close()

"""Fetches an image over HTTP without letting the URL's author reach inside the network.

Every hop (the URL and each redirect) is checked in full: scheme, credentials, spelling, domain
list and address. Bytes are counted as they arrive and one deadline covers everything. Errors name
the host at most: never the query, which may hold a signature, and never what the server sent.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp
from yarl import URL

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media.addresses import is_public, parse_literal
from epd.media.resolver import AddressRule, NameService, SystemNameService, VettingResolver

_MAX_URL_CHARS = 8192
_MAX_HOST_CHARS = 253  # RFC 1035
_CHUNK_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif, image/bmp, image/*;q=0.5",
    "Accept-Encoding": "identity",
    "User-Agent": "epd-serve",
}


class Fetcher(Protocol):
    """Gets the bytes behind a URL. The tests' fake is the other implementation."""

    async def fetch(self, url: str) -> bytes:
        """The whole body.

        Raises:
            MediaError: it could not be had; without `param`, which only the caller knows.
        """
        ...

    async def close(self) -> None: ...


class HttpFetcher:
    """The `Fetcher` for http and https. Build it inside the running event loop.

    Args:
        limits: bytes, time, redirects, domains, addresses.
        names: looks host names up; the operating system by default.
        is_address_allowed: overrides the rule that `limits.allow_private_addresses` gives.
    """

    def __init__(
        self,
        limits: MediaConfig,
        *,
        names: NameService | None = None,
        is_address_allowed: AddressRule | None = None,
    ) -> None:
        self._limits = limits
        if is_address_allowed is None:
            is_address_allowed = _allow_any if limits.allow_private_addresses else is_public
        self._resolver = VettingResolver(names or SystemNameService(), is_address_allowed)
        self._session = aiohttp.ClientSession(
            # Each connection asks the resolver anew, so a cached answer is never an unvetted one.
            connector=aiohttp.TCPConnector(
                resolver=self._resolver, use_dns_cache=False, limit=limits.max_concurrent_fetches
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),  # `fetch` keeps the one deadline
            trust_env=False,  # a proxy would connect where we did not check
            auto_decompress=False,  # a small body stays small
        )

    async def fetch(self, url: str) -> bytes:
        """The body behind `url`, redirects followed. Cancelling closes the connection.

        Raises:
            MediaError: the URL is not allowed, does not answer with an image's bytes in time, or
                has more of them than allowed.
        """
        timeout_s = self._limits.timeout_s
        hop = self.check_url(url)
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(self._limits.max_redirects + 1):
                    answer = await self._get(hop)
                    if isinstance(answer, bytes):
                        return answer
                    hop = answer
        except TimeoutError as exc:
            raise MediaError(
                f"the image could not be fetched from {hop.host} within {timeout_s:g} s"
            ) from exc
        raise MediaError(
            f"the image URL redirects more than {self._limits.max_redirects} times: "
            "send the URL it ends at"
        )

    async def close(self) -> None:
        await self._session.close()
        await self._resolver.close()

    def check_url(self, text: str) -> URL:
        """Parse a URL and refuse all that can be refused without a look-up.

        Raises:
            MediaError: see the module's description.
        """
        if len(text) > _MAX_URL_CHARS:
            raise MediaError(f"the image URL is longer than {_MAX_URL_CHARS} characters")
        if any(char <= " " or char == "\x7f" for char in text):
            raise MediaError("the image URL holds spaces or control characters: escape them")
        try:
            url = URL(text)
            _ = url.host  # decodes punycode, which errors quote: broken, it would raise there
        except ValueError as exc:
            raise MediaError("the image URL is not a valid URL") from exc
        if url.scheme not in ("http", "https"):
            raise MediaError("the image URL must start with http://, https:// or data:")
        if url.user is not None or url.password is not None:
            raise MediaError("the image URL must not hold a user name or password")
        host = url.raw_host  # the very string that aiohttp connects to
        if not host:
            raise MediaError("the image URL names no host")
        if len(host) > _MAX_HOST_CHARS:
            raise MediaError(f"the image URL's host is longer than {_MAX_HOST_CHARS} characters")
        self._check_host(host)
        return url

    def _check_host(self, host: str) -> None:
        """Refuse by name; and by address where the URL spells one, as no resolver is asked then."""
        name = host.rstrip(".").lower()
        domains = [domain.strip(".").lower() for domain in self._limits.allowed_domains]
        if domains and not any(name == d or name.endswith("." + d) for d in domains):
            raise MediaError(
                f"images are not fetched from {host}: only from {', '.join(domains)} "
                "and their subdomains"
            )
        try:
            address = parse_literal(host)
        except ValueError as exc:
            raise MediaError(
                f"the image URL's host {host} is an unusual spelling of an IP address: "
                "write a.b.c.d or a host name"
            ) from exc
        if address is not None:
            self._resolver.check(address, host)

    async def _get(self, url: URL) -> bytes | URL:
        """One hop: the body, or where the server sends us next."""
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    return self._redirect(url, response)
                return await self._read_body(url, response)
        except (aiohttp.ClientError, OSError) as exc:
            if isinstance(exc, TimeoutError):
                raise
            raise MediaError(
                f"the image could not be fetched from {url.host}: {_why_failed(exc)}"
            ) from None  # the cause may quote what the server sent, and so end up in a log

    def _redirect(self, url: URL, response: aiohttp.ClientResponse) -> URL:
        location = response.headers.get("Location", "")
        if not location:
            raise MediaError(f"{url.host} redirects the image URL to nowhere")
        try:
            target = str(url.join(URL(location)))
        except ValueError as exc:
            raise MediaError(f"{url.host} redirects to something that is not a URL") from exc
        try:
            return self.check_url(target)
        except MediaError as exc:
            raise MediaError(f"{url.host} redirects where it must not: {exc.message}") from exc

    async def _read_body(self, url: URL, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            raise MediaError(
                f"the image could not be fetched: {url.host} answered HTTP {response.status}"
            )
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaError(f"{url.host} sends the image compressed, although asked not to")
        max_bytes = self._limits.max_bytes
        too_large = MediaError(f"the image has more than the {max_bytes} bytes allowed")
        if response.content_length is not None and response.content_length > max_bytes:
            raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)


def _allow_any(address: object) -> bool:
    return True


def _why_failed(exc: Exception) -> str:
    """A sentence in our words: an exception's own text may quote the server's answer."""
    match exc:
        case aiohttp.ClientConnectorDNSError():
            return "its name does not resolve"
        case aiohttp.ClientSSLError() | aiohttp.ClientConnectorCertificateError():
            return "its TLS certificate or handshake is not valid"
        case aiohttp.ClientConnectorError():
            return "it does not accept connections"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientPayloadError():
            return "the connection ended before the whole image was there"
        case _:
            return "it does not answer as an HTTP server should"

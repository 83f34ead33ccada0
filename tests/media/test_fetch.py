import asyncio
import gzip
import time
import traceback
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv4Address

import pytest
from aiohttp import web

from epd.config import MediaConfig
from epd.errors import MediaError
from epd.media import HttpFetcher
from epd.media.addresses import IPAddress

from .images import png

PNG = png(20, 10)
OPEN = MediaConfig(
    max_bytes=100_000, cache_bytes=100_000, timeout_s=5, allow_private_addresses=True
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def site(handler: Handler, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """A web server that answers every path with `handler`."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, host, 0)
    await server.start()
    try:
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def raw_site(talk: Talk) -> AsyncIterator[str]:
    """A server below HTTP, to break its rules; the request is read first."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await talk(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


class Names:
    """A name service with fixed answers; a list of lists gives one answer per look-up."""

    def __init__(self, answers: dict[str, list[list[str]]]) -> None:
        self._answers = answers
        self.num_lookups = 0

    async def lookup(self, host: str) -> list[str]:
        self.num_lookups += 1
        answers = self._answers.get(host)
        if answers is None:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def fetcher(
    limits: MediaConfig = OPEN,
    names: Names | None = None,
    allow: Callable[[IPAddress], bool] | None = None,
) -> AsyncIterator[HttpFetcher]:
    http = HttpFetcher(limits, names=names, is_address_allowed=allow)
    try:
        yield http
    finally:
        await http.close()


async def refusal(http: HttpFetcher, url: str) -> str:
    with pytest.raises(MediaError) as caught:
        await http.fetch(url)
    assert caught.value.status == 400
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))
    return caught.value.message


async def picture(request: web.Request) -> web.Response:
    return web.Response(body=PNG, content_type="image/png")


async def test_an_image_is_fetched_without_cookies_or_compression() -> None:
    seen: list[web.Request] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request)
        response = web.Response(body=PNG)
        response.set_cookie("tracked", "yes")
        return response

    async with site(handler) as url, fetcher() as http:
        assert await http.fetch(url + "/a.png") == PNG
        assert await http.fetch(url + "/b.png?x=1") == PNG
    assert [request.path for request in seen] == ["/a.png", "/b.png"]
    assert all("Cookie" not in request.headers for request in seen)
    assert all(request.headers["Accept-Encoding"] == "identity" for request in seen)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with site(picture) as url, fetcher() as http:
        assert await http.fetch(url) == PNG


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LOCALHOST.",
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "127.0.0.1.",
        "１２７.0.0.1",
        "127。0。0。1",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[fe80::1%25lo]",
        "169.254.169.254",
        "10.0.0.1",
    ],
)
async def test_no_spelling_of_an_inside_address_is_reached_by_default(host: str) -> None:
    num_requests = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal num_requests
        num_requests += 1
        return web.Response(body=PNG)

    async with site(handler) as url, fetcher(MediaConfig(timeout_s=2)) as http:
        port = url.rpartition(":")[2]
        message = await refusal(http, f"http://{host}:{port}/a.png")
    assert any(
        reason in message
        for reason in ("not public", "unusual spelling", "valid URL", "does not resolve")
    )
    assert num_requests == 0


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("ftp://example.com/a.png", "must start with"),
        ("file:///etc/passwd", "must start with"),
        ("//example.com/a.png", "must start with"),
        ("http:///a.png", "host|valid"),
        ("http://", "host|valid"),
        ("http://user@example.com/", "user name or password"),
        ("http://user:secret@example.com/", "user name or password"),
        ("http://:secret@example.com/", "user name or password"),
        ("http://127.0.0.1\\@example.com/", "valid"),
        ("http://exa\nmple.com/", "spaces or control"),
        ("http://example.com/a b", "spaces or control"),
        ("http://example.com:99999/", "valid"),
        ("http://[::1/", "valid"),
        ("http://xn--/", "valid"),
        ("http://xn--a.example/", "valid"),
        ("http://" + "a" * 254 + "/", "longer than 253"),
        ("http://example.com/" + "a" * 9000, "longer than 8192"),
        ("http://" + "a" * 64 + ".example/", "does not resolve"),
    ],
)
async def test_a_url_that_is_not_plain_http_is_refused(url: str, hint: str) -> None:
    async with fetcher() as http:
        with pytest.raises(MediaError, match=hint) as caught:
            await http.fetch(url)
    assert "secret" not in caught.value.message


async def test_a_name_with_one_inside_address_among_its_addresses_is_refused() -> None:
    names = Names({"mixed.test": [["8.8.8.8", "10.0.0.1"]]})
    async with fetcher(MediaConfig(), names) as http:
        message = await refusal(http, "http://mixed.test/a.png")
    assert "mixed.test" in message and "10.0.0.1" not in message


def only(text: str) -> Callable[[IPAddress], bool]:
    return lambda address: address == IPv4Address(text)


async def test_a_name_that_rebinds_to_loopback_is_never_connected_there() -> None:
    """127.0.0.2 plays the public host. Each connection uses the one answer that was judged."""
    names = Names({"rebind.test": [["127.0.0.2"], ["127.0.0.1"]]})
    served: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        served.append(request.transport.get_extra_info("sockname")[0])
        response = web.Response(body=PNG)
        response.force_close()
        return response

    async with (
        site(handler, "0.0.0.0") as url,
        fetcher(MediaConfig(), names, only("127.0.0.2")) as http,
    ):
        url = url.replace("0.0.0.0", "rebind.test")
        assert await http.fetch(url) == PNG
        assert names.num_lookups == 1
        assert "not public" in await refusal(http, url)
    assert served == ["127.0.0.2"]


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/inside",
        "//127.0.0.1:{port}/inside",
        "http://inside.test:{port}/inside",
        "http://2130706433:{port}/inside",
        "http://[::ffff:127.0.0.1]:{port}/inside",
        "http://user@pictures.test:{port}/inside",
        "file:///etc/passwd",
        "ftp://pictures.test/inside",
        "http://[broken",
        "http://xn--/",
        "data:image/png;base64,AAAA",
    ],
)
async def test_a_redirect_from_an_allowed_host_to_a_refused_one_is_refused(location: str) -> None:
    names = Names({"pictures.test": [["127.0.0.2"]], "inside.test": [["127.0.0.1"]]})
    paths: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        paths.append(request.path)
        target = location.format(port=request.url.port)
        return web.Response(status=302, headers={"Location": target})

    async with (
        site(handler, "0.0.0.0") as url,
        fetcher(MediaConfig(), names, only("127.0.0.2")) as http,
    ):
        await refusal(http, url.replace("0.0.0.0", "pictures.test") + "/first")
    assert paths == ["/first"]


async def hop_down(request: web.Request) -> web.Response:
    """/3 → /2 → /1 → /0, the picture."""
    n = int(request.path[1:])
    if n == 0:
        return web.Response(body=PNG)
    return web.Response(status=(301, 302, 303, 307, 308)[n % 5], headers={"Location": f"{n - 1}"})


async def test_redirects_are_followed_up_to_the_limit() -> None:
    async with site(hop_down) as url, fetcher() as http:
        assert await http.fetch(url + "/3") == PNG
        assert "redirects more than 3 times" in await refusal(http, url + "/4")


async def test_a_redirect_without_a_target_is_refused() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=302)

    async with site(handler) as url, fetcher() as http:
        assert "to nowhere" in await refusal(http, url)


async def test_only_listed_domains_and_their_subdomains_are_reached() -> None:
    limits = MediaConfig(allow_private_addresses=True, allowed_domains=(".Pictures.test",))
    answer = [["127.0.0.1"]]
    names = Names({n: answer for n in ("pictures.test", "a.pictures.test", "evilpictures.test")})
    async with site(picture) as url, fetcher(limits, names) as http:
        for host in ("pictures.test", "a.pictures.test", "A.Pictures.TEST"):
            assert await http.fetch(url.replace("127.0.0.1", host)) == PNG
        for host in ("evilpictures.test", "pictures.test.evil.test", "127.0.0.1"):
            message = await refusal(http, url.replace("127.0.0.1", host))
            assert "only from pictures.test" in message


async def test_a_stated_length_over_the_limit_is_refused_before_reading() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100001\r\n\r\n")
        await reader.read()  # sends no body; returns when the client hangs up

    async with raw_site(talk) as url, fetcher() as http:
        assert "more than the 100000 bytes" in await refusal(http, url)


async def test_an_endless_body_is_cut_at_the_limit() -> None:
    num_sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal num_sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)
            num_sent += 10_000

    async with site(handler) as url, fetcher() as http:
        assert "more than the 100000 bytes" in await refusal(http, url)
    assert num_sent < 50_000_000


async def test_a_gzip_bomb_is_not_inflated() -> None:
    bomb = gzip.compress(b"\0" * 50_000_000, 1)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    limits = MediaConfig(allow_private_addresses=True)
    async with site(handler) as url, fetcher(limits) as http:
        tracemalloc.start()
        try:
            assert "compressed" in await refusal(http, url)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
        finally:
            tracemalloc.stop()


async def test_a_body_shorter_than_stated_is_refused() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + PNG[:50])
        await writer.drain()

    async with raw_site(talk) as url, fetcher() as http:
        assert "before the whole image" in await refusal(http, url)


async def test_a_body_longer_than_stated_is_not_read_past_its_length() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n" + PNG)
        await writer.drain()

    async with raw_site(talk) as url, fetcher() as http:
        try:
            assert await http.fetch(url) == PNG[:50]
        except MediaError as exc:  # if the surplus came along with the head
            assert "as an HTTP server should" in exc.message


@pytest.mark.parametrize(
    "answer",
    [
        b"SECRET\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nSECRET\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"SECRET" * 20_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nSECRET\r\n",
        b"HTTP/1.1 500 SECRET\r\nContent-Length: 6\r\n\r\nSECRET",
        b"HTTP/1.1 204 SECRET\r\n\r\n",
        b"",
    ],
)
async def test_what_the_server_says_is_not_repeated(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    async with raw_site(talk) as url, fetcher() as http:
        message = await refusal(http, url + "/?signature=SECRET")
    assert "127.0.0.1" in message and "SECRET" not in message


async def test_a_server_that_trickles_meets_the_deadline() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.02)

    limits = MediaConfig(timeout_s=0.3, allow_private_addresses=True)
    started = time.monotonic()
    async with site(handler) as url, fetcher(limits) as http:
        assert "within 0.3 s" in await refusal(http, url)
    assert time.monotonic() - started < 2


async def test_a_server_that_never_answers_meets_the_deadline() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    limits = MediaConfig(timeout_s=0.2, allow_private_addresses=True)
    async with raw_site(talk) as url, fetcher(limits) as http:
        assert "within 0.2 s" in await refusal(http, url)


async def test_a_name_service_that_never_answers_meets_the_deadline() -> None:
    class Silent(Names):
        async def lookup(self, host: str) -> list[str]:
            await asyncio.Event().wait()
            raise AssertionError

    async with fetcher(MediaConfig(timeout_s=0.2), Silent({})) as http:
        assert "within 0.2 s" in await refusal(http, "http://pictures.test/")


async def test_a_refused_connection_and_an_unknown_name_are_told_apart(
    unused_tcp_port: int,
) -> None:
    async with fetcher(names=Names({})) as http:
        closed = await refusal(http, f"http://127.0.0.1:{unused_tcp_port}/")
        unknown = await refusal(http, "http://nowhere.test/")
    assert "does not accept connections" in closed
    assert "does not resolve" in unknown


async def test_a_server_without_tls_behind_https_is_refused() -> None:
    async with site(picture) as url, fetcher() as http:
        message = await refusal(http, url.replace("http:", "https:"))
    assert "TLS" in message or "connections" in message

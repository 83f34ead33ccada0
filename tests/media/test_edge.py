import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator

import pytest

from epd.config import MediaConfig
from epd.errors import EPDError, MediaError, OverloadedError
from epd.media import MediaCache, MediaEdge

from .images import encode, exif, jpeg, noise, png

PARAM = "messages[0].content[1].image_url.url"
PNG = png(20, 10)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


class FakeFetcher:
    """Serves from a dict, counts, and can be held back."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        self.bodies = bodies
        self.num_started = self.num_running = self.max_running = self.num_cancelled = 0
        self.is_closed = False
        self.go = asyncio.Event()
        self.go.set()

    async def fetch(self, url: str) -> bytes:
        self.num_started += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
            if url not in self.bodies:
                raise MediaError("the image could not be fetched: it answered HTTP 404")
            return self.bodies[url]
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, limits: MediaConfig, bodies: dict[str, bytes]) -> None:
        self.cache = MediaCache(limits.cache_bytes)
        self.fetcher = FakeFetcher(bodies)
        self.edge = MediaEdge(limits, self.cache, self.fetcher)


A, B = "http://pictures.test/a.png", "https://pictures.test/b.jpg"


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig(MediaConfig(), {A: PNG, B: jpeg()})
    yield rig
    await rig.edge.close()
    assert rig.fetcher.is_closed
    assert rig.cache.pinned_bytes == 0
    assert rig.edge.num_fetches == 0


async def test_the_same_picture_by_data_url_and_by_link_is_one_item(rig: Rig) -> None:
    by_data = await rig.edge.resolve(data_url(PNG), param=PARAM)
    by_link = await rig.edge.resolve(A, param=PARAM)
    assert by_data == by_link
    assert by_data.content_hash == hashlib.sha256(PNG).hexdigest()
    assert (by_data.width, by_data.height, by_data.mime) == (20, 10, "image/png")
    assert rig.cache.num_items == 1
    assert repr(PNG)[:10] not in repr(by_data)


async def test_the_declared_type_does_not_matter(rig: Rig) -> None:
    item = await rig.edge.resolve(data_url(jpeg(8, 6)), param=PARAM)
    assert item.mime == "image/jpeg"


async def test_a_large_rotated_picture_is_handled_off_the_loop(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threaded = 0
    to_thread = asyncio.to_thread

    async def spy(*args: object, **kwargs: object) -> object:
        nonlocal num_threaded
        num_threaded += 1
        return await to_thread(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "to_thread", spy)
    large = encode(noise(900, 700), "PNG", exif=exif(6), compress_level=0)
    rig.fetcher.bodies[A] = large
    for url in (A, data_url(large)):
        item = await rig.edge.resolve(url, param=PARAM)
        assert (item.width, item.height) == (700, 900)
    assert num_threaded == 2


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://pictures.test/a.png",
        "pictures.test/a.png",
        "/etc/passwd",
        "",
        "iVBORw0KGgo",
        "javascript:alert(1)",
        "data:image/png;base64,@@@",
        data_url(b""),
        data_url(b"hello"),
        data_url(jpeg()[:-300]),
        "http://pictures.test/missing.png",
    ],
)
async def test_a_bad_reference_names_the_field(rig: Rig, url: str) -> None:
    with pytest.raises(MediaError) as caught:
        await rig.edge.resolve(url, param=PARAM)
    error = caught.value.to_dict()["error"]
    assert error["param"] == PARAM
    assert error["code"] == "invalid_image"
    assert rig.cache.num_items == 0


async def test_requests_for_one_url_share_one_fetch(rig: Rig) -> None:
    rig.fetcher.go.clear()
    waiters = [asyncio.create_task(rig.edge.resolve(A, param=str(i))) for i in range(5)]
    await asyncio.sleep(0.01)
    assert rig.edge.num_fetches == 1
    rig.fetcher.go.set()
    items = await asyncio.gather(*waiters)
    assert len({id(item) for item in items}) == 1
    assert rig.fetcher.num_started == 1


async def test_a_shared_failure_names_the_field_of_each_request(rig: Rig) -> None:
    missing = "http://pictures.test/missing.png"
    results = await asyncio.gather(
        *(rig.edge.resolve(missing, param=f"messages[{i}]") for i in range(3)),
        return_exceptions=True,
    )
    assert rig.fetcher.num_started == 1
    assert [r.param for r in results if isinstance(r, EPDError)] == [
        f"messages[{i}]" for i in range(3)
    ]


async def test_the_fetch_goes_on_while_anyone_waits_and_stops_when_nobody_does(rig: Rig) -> None:
    rig.fetcher.go.clear()
    first, second = (asyncio.create_task(rig.edge.resolve(A, param=PARAM)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert (rig.fetcher.num_running, rig.fetcher.num_cancelled) == (1, 0)
    second.cancel()
    await asyncio.sleep(0.01)
    assert (rig.fetcher.num_running, rig.fetcher.num_cancelled) == (0, 1)
    assert rig.edge.num_fetches == 0


async def test_all_images_come_back_in_order_and_pinned(rig: Rig) -> None:
    parts = [(B, "p0"), (data_url(PNG), "p1"), (A, "p2"), (B, "p3")]
    with await rig.edge.resolve_all(parts) as lease:
        assert [item.mime for item in lease.items] == [
            "image/jpeg",
            "image/png",
            "image/png",
            "image/jpeg",
        ]
        assert rig.cache.pinned_bytes == lease.num_bytes == len(PNG) + len(rig.fetcher.bodies[B])
        assert rig.fetcher.num_started == 2
    assert rig.cache.pinned_bytes == 0
    assert rig.cache.num_items == 2


async def test_no_images_is_an_empty_lease(rig: Rig) -> None:
    with await rig.edge.resolve_all([]) as lease:
        assert lease.items == ()


async def test_the_first_error_cancels_the_rest_and_leaves_nothing_pinned(rig: Rig) -> None:
    rig.fetcher.go.clear()
    parts = [(A, "p0"), (data_url(PNG), "p1"), (data_url(b"no image"), "p2")]
    with pytest.raises(MediaError) as caught:
        await rig.edge.resolve_all(parts)
    assert caught.value.param == "p2"
    await asyncio.sleep(0.01)
    assert (rig.fetcher.num_running, rig.fetcher.num_cancelled) == (0, 1)


async def test_a_cancelled_request_leaves_nothing_pinned(rig: Rig) -> None:
    rig.fetcher.go.clear()
    task = asyncio.create_task(rig.edge.resolve_all([(data_url(PNG), "p0"), (A, "p1")]))
    await asyncio.sleep(0.01)
    assert rig.cache.pinned_bytes == len(PNG)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert rig.fetcher.num_running == 0


async def test_too_many_images_are_refused_before_any_is_fetched() -> None:
    rig = Rig(MediaConfig(max_images_per_request=2), {A: PNG})
    with pytest.raises(MediaError, match="3 images, more than the 2") as caught:
        await rig.edge.resolve_all([(A, "p0"), (A, "p1"), (A, "p2")])
    assert caught.value.param == "p2"
    assert rig.fetcher.num_started == 0


async def test_fetches_at_once_are_bounded() -> None:
    bodies = {f"http://pictures.test/{i}": png(i + 1, 1) for i in range(12)}
    rig = Rig(MediaConfig(max_concurrent_fetches=3), bodies)
    with await rig.edge.resolve_all([(url, url) for url in bodies]) as lease:
        assert [item.width for item in lease.items] == list(range(1, 13))
    assert rig.fetcher.max_running == 3


async def test_no_fetch_slot_in_time_is_overload_and_not_the_clients_fault() -> None:
    rig = Rig(MediaConfig(max_concurrent_fetches=1, timeout_s=0.05), {A: PNG, B: jpeg()})
    rig.fetcher.go.clear()
    holder = asyncio.create_task(rig.edge.resolve(A, param="a"))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await rig.edge.resolve(B, param="b")
    rig.fetcher.go.set()
    await holder
    assert (await rig.edge.resolve(B, param="b")).mime == "image/jpeg"


async def test_one_request_over_the_cache_is_its_own_fault_but_a_full_cache_is_not() -> None:
    pictures = [png(30, 20 + i) for i in range(3)]
    budget = len(pictures[0]) + len(pictures[1])
    rig = Rig(MediaConfig(max_bytes=budget, cache_bytes=budget), {})
    parts = [(data_url(picture), f"p{i}") for i, picture in enumerate(pictures)]
    with pytest.raises(MediaError, match="together") as caught:
        await rig.edge.resolve_all(parts)
    assert caught.value.param is not None
    assert rig.cache.pinned_bytes == 0
    with await rig.edge.resolve_all(parts[:2]), pytest.raises(OverloadedError):
        await rig.edge.resolve_all(parts[2:])
    with await rig.edge.resolve_all(parts[2:]) as lease:
        assert len(lease.items) == 1

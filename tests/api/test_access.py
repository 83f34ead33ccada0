"""Who may call what: API keys for clients, the cluster token for the rest, some paths for all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from epd.auth import APIKeys
from tests.fakes.deployment import TOKEN, Deployment, chat_body, deployed

KEY = "sk-right-key-of-the-tests"
WRONG = "sk-wrong-key-of-the-tests"


@pytest.fixture
async def d() -> AsyncIterator[Deployment]:
    async with deployed(api_keys=APIKeys([KEY, "another"])) as deployment:
        yield deployment


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer(WRONG), 401),
        (bearer(""), 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY} x"}, 401),
        (bearer(KEY), 200),
        (bearer("another"), 200),
        ({"Authorization": f"bearer  {KEY}"}, 200),
        (TOKEN.headers, 200),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/metrics"])
async def test_clients_need_a_key(
    d: Deployment, path: str, headers: dict[str, str], status: int
) -> None:
    if path == "/v1/chat/completions":
        answer = await d.send(chat_body(), headers)
    else:
        answer = await d.request("GET", path, headers=headers)
    assert answer.status == status
    if status == 401:
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.error["code"] == "invalid_api_key"
        assert KEY not in answer.body.decode()
        assert WRONG not in answer.body.decode()


async def test_without_keys_anyone_is_a_client() -> None:
    async with deployed() as d:
        assert (await d.chat()).status == 200
        assert (await d.request("GET", "/v1/models")).status == 200
        assert (await d.request("GET", "/metrics")).status == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(d: Deployment, path: str) -> None:
    assert (await d.request("GET", path)).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/internal/workers/x"),
        ("GET", "/admin/workers"),
        ("GET", "/%61dmin/workers"),
        ("GET", "/admin/requests/x"),
    ],
)
@pytest.mark.parametrize("headers", [{}, bearer(KEY), bearer(WRONG)])
async def test_a_clients_key_opens_nothing_internal(
    d: Deployment, method: str, path: str, headers: dict[str, str]
) -> None:
    assert (await d.request(method, path, b"{}", headers)).status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/internal/media/../workers/x",
        "/internal/media/..%2Fworkers%2Fx",
        "/internal/encoders/x/../../workers/x",
        "/v1/../admin/workers",
        "/v1/%2e%2e/admin/workers",
        "//admin/workers",
        "/health/../admin/workers",
    ],
)
async def test_no_detour_leads_around_the_check(d: Deployment, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(d.url.rpartition(":")[2]))
    for method in ("GET", "PUT"):
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
        writer.write(request.encode())
        status = (await reader.readline()).split()[1]
        assert status in (b"401", b"404", b"405")
        while line := (await reader.readline()).strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        await reader.readexactly(length)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer \xff\xfe",
        b"Authorization: Bearer " + KEY.encode() + b"\xff",
        b"Authorization: Bearer " + b"x" * 7000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/admin/workers"])
async def test_a_key_of_strange_bytes_is_wrong_and_no_crash(
    d: Deployment, line: bytes, path: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(d.url.rpartition(":")[2]))
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode() + line + b"\r\n\r\n"
    )
    assert b" 401 " in (await reader.read()).split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()


async def test_no_key_is_ever_logged(d: Deployment, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for key in (KEY, WRONG):
        await d.send(chat_body(), bearer(key))
        await d.send(b"nope", bearer(key))
        await d.request("GET", "/admin/workers", headers=bearer(key))
    assert KEY not in caplog.text
    assert WRONG not in caplog.text


async def test_a_malformed_header_is_refused_and_its_key_not_logged(
    d: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(d.url.rpartition(":")[2]))
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode()
    writer.write(head + b"\x00\r\n\r\n")
    answer = await reader.read()
    assert b" 400 " in answer.split(b"\r\n")[0]
    writer.close()
    await writer.wait_closed()
    assert KEY not in caplog.text


async def test_logs_never_hold_a_capability_or_a_line_of_the_clients(
    d: Deployment, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("epd.coordinator.encode_gateway.parse", bug)
    slot = d.fleet.slots[0]
    assert (await d.request("POST", f"{slot}/send", b"{}")).status == 500
    await d.request("GET", "/admin/requests/x%0aforged", headers=TOKEN.headers)
    assert "slot" in caplog.text
    assert slot.split("/")[3] not in caplog.text
    assert "\nforged" not in caplog.text

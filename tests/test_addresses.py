from __future__ import annotations

import pytest
from yarl import URL

from epd.addresses import host_port, http_url, parse_host, parse_host_port, parse_url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:80"),
        ("epd.example", "http://epd.example:80"),
        ("fd00::1", "http://[fd00::1]:80"),
    ],
)
def test_an_address_is_composed_so_that_it_can_be_parsed_again(host: str, url: str) -> None:
    assert http_url(host, 80) == url == parse_url(url)
    assert (URL(url).host, URL(url).port) == (host, 80)
    assert parse_host_port(host_port(host, 80)) == url.removeprefix("http://")


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("localhost", "localhost"),
        ("node_7.cluster.local.", "node_7.cluster.local."),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:0", "::"),
        ("FD00:0::1", "fd00::1"),
    ],
)
def test_a_host_has_one_spelling(text: str, host: str) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "10.0.0.1:8000",
        "host:8000",
        "[::1]:8000",
        "[::1",
        "::1]",
        "[host]",
        "[[::1]]",
        "fe80::1%eth0",
        "1::2::3",
        "http://h",
        "h/path",
        "u@h",
        "-h",
        "h\n",
    ],
)
def test_what_is_no_host_alone_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is no host: give a name or an address alone"):
        parse_host(text)


@pytest.mark.parametrize("text", ["h", "h:", ":1", "h:0", "h:65536", "::1:1", "[::1]", "h:1:2", ""])
def test_what_is_no_host_and_port_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is no host:port"):
        parse_host_port(text)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h", "http://h"),
        ("https://h:1/", "https://h:1"),
        ("http://[0::1]:8000", "http://[::1]:8000"),
        ("http://[fd00::1]/epd/", "http://[fd00::1]/epd"),
    ],
)
def test_a_url_has_one_spelling(text: str, url: str) -> None:
    assert parse_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nowhere",
        "ftp://h",
        "http://",
        "http:///x",
        "http://::1:8000",
        "http://fd00::1",
        "http://[::1:8000",
        "http://[::1]8000",
        "http://[h]:1",
        "http://[fe80::1%25eth0]:1",
        "http://h:0",
        "http://h:65536",
        "http://h:x",
        "http://u:p@h",
        "http://h?q",
        "http://h/#f",
        "http://h/a b",
        "http://h\n",
    ],
)
def test_what_is_no_url_of_a_server_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is no URL of a server") as caught:
        parse_url(text)
    assert "http://[fd00::1]:8000" in str(caught.value)

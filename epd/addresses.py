"""How hosts, ports and URLs are written: an IPv6 address in brackets wherever a port may follow.

What comes from outside is parsed here once, into one spelling; what is composed is composed here.
Pure: no name is looked up. Errors are sentences for the person who wrote the address.
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?")
_HOST_PORT = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]+):(?P<port>\d{1,5})")
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[^\[\]/]*\]|[^:/\[\]@?#]+)(:(?P<port>\d{1,5}))?"
    r"(?P<path>/[^\s?#]*)?"
)


def bracketed(host: str) -> str:
    """`host` as it stands before a port: `::1` becomes `[::1]`."""
    return f"[{host}]" if ":" in host else host


def host_port(host: str, port: int) -> str:
    """`host:port`."""
    return f"{bracketed(host)}:{port}"


def http_url(host: str, port: int) -> str:
    """The URL of a server."""
    return f"http://{host_port(host, port)}"


def parse_host(text: str) -> str:
    """A name or an address alone; IPv6 in its shortest spelling, without brackets.

    Raises:
        ValueError: it is neither, or something follows it.
    """
    host = text[1:-1] if re.fullmatch(r"\[.*:.*\]", text) else text
    try:
        # A scope (fe80::1%eth0) names an interface of one machine, so no peer could use it.
        if ":" in host and "%" not in host:
            return str(IPv6Address(host))
    except ValueError:
        pass
    if not _NAME.fullmatch(host):
        raise ValueError(
            f"{text!r} is no host: give a name or an address alone, such as 10.0.0.1 or fd00::1"
        )
    return host


def parse_host_port(text: str) -> str:
    """`host:port`, the port above 0.

    Raises:
        ValueError: it is not.
    """
    match = _HOST_PORT.fullmatch(text)
    try:
        if match is not None:
            return host_port(parse_host(match["host"]), _port(match["port"]))
    except ValueError:
        pass
    raise ValueError(f"{text!r} is no host:port: give one such as 10.0.0.1:8000 or [fd00::1]:8000")


def parse_url(text: str) -> str:
    """An http or https URL of a server, perhaps with a path, without a slash at its end.

    Raises:
        ValueError: it is not, or has credentials, a query or a fragment.
    """
    match = _URL.fullmatch(text)
    try:
        if match is not None:
            host, port = bracketed(parse_host(match["host"])), match["port"]
            where = host if port is None else f"{host}:{_port(port)}"
            return f"{match['scheme']}://{where}{(match['path'] or '').rstrip('/')}"
    except ValueError:
        pass
    raise ValueError(
        f"{text!r} is no URL of a server: give one such as http://10.0.0.1:8000 or "
        "http://[fd00::1]:8000"
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 < port < 2**16:
        raise ValueError(f"{port} is no port: give one from 1 to 65535")
    return port

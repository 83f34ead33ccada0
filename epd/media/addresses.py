"""Which network addresses an image may be fetched from. Pure: no I/O, no names.

The rule is deny by default: an address is public only if the IANA registries call it globally
reachable unicast. IPv6 forms that carry an IPv4 address are judged by the address they carry
where a gateway would really go there (mapped, NAT64), and refused where no web server can live
(6to4, Teredo).
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

IPAddress = IPv4Address | IPv6Address

# IANA IPv4 Special-Purpose Address Registry, without its globally reachable anycast services
# (which serve no images), plus multicast. Written out, because `ipaddress.is_global` changed
# between Python patch releases.
_REFUSED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local: cloud metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)

# Everything outside 2000::/3 is refused: unspecified, loopback, IPv4-compatible, unique local,
# link-local, site-local, multicast, local-use NAT64 and whatever IANA has not yet given out.
_GLOBAL_V6 = IPv6Network("2000::/3")
_REFUSED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)

_MAPPED = IPv6Network("::ffff:0:0/96")  # a socket connects to the IPv4 address itself
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: how an IPv6-only machine reaches IPv4 hosts


def is_public(address: IPAddress) -> bool:
    """Whether `address` is globally reachable unicast, so that fetching from it is allowed."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _REFUSED_V4)
    if address.scope_id is not None:
        return False
    if address in _MAPPED or address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _GLOBAL_V6 and not any(address in network for network in _REFUSED_V6)


def parse_literal(host: str) -> IPAddress | None:
    """The address that `host` spells, or None if it is a name.

    A host whose last label is a number is an IPv4 address by the URL standard ("ends in a
    number"), and C libraries accept many odd spellings of one: `2130706433`, `0x7f.1`, `127.1`,
    `0177.0.0.1`. Only the canonical spelling is accepted, so that what is checked is what is
    reached.

    Raises:
        ValueError: `host` is an address in another spelling, or a scoped IPv6 address.
    """
    if ":" in host:
        if "%" in host:
            raise ValueError("a scoped IPv6 address")
        return IPv6Address(host)
    last_label = host.rstrip(".").rpartition(".")[2].lower()
    if last_label.isdigit() or last_label.startswith("0x"):
        return IPv4Address(host)
    return None


def parse_resolved(text: str) -> IPAddress:
    """The address in a resolver's answer, where a scope (`fe80::1%eth0`) may appear.

    Raises:
        ValueError: `text` is not an address.
    """
    return ip_address(text)

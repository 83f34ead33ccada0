from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epd.media.addresses import is_public, parse_literal

v4 = st.ip_addresses(v=4)
v6 = st.ip_addresses(v=6)


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::8.8.8.8",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:808:808::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "2606:4700::1%eth0",
    ],
)
def test_an_address_that_is_not_globally_routable_is_refused(text: str) -> None:
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "8.8.8.8",
        "1.1.1.1",
        "100.63.255.255",
        "100.128.0.0",
        "172.32.0.1",
        "2606:4700:4700::1111",
        "2a00:1450:4001::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_a_public_address_is_allowed(text: str) -> None:
    assert is_public(ip_address(text))


@given(v4)
def test_no_address_that_python_calls_special_is_public(address: IPv4Address) -> None:
    special = (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
        or not address.is_global
    )
    assert not (special and is_public(address))


@given(v6)
def test_no_v6_address_that_python_calls_special_is_public(address: IPv6Address) -> None:
    embedded = address.ipv4_mapped
    if embedded is None:
        assume(int(address) >> 32 != 0x64FF9B << 64)  # NAT64 is judged by what it carries
        special = address.is_private or address.is_multicast or address.is_reserved
        assert not (special and is_public(address))
    else:
        assert is_public(address) == is_public(embedded)


@given(v4)
def test_a_v6_form_is_never_more_reachable_than_the_v4_address_in_it(address: IPv4Address) -> None:
    number = int(address)
    mapped = IPv6Address((0xFFFF << 32) | number)
    nat64 = IPv6Address((0x64FF9B << 96) | number)
    compatible = IPv6Address(number)
    six_to_four = IPv6Address((0x2002 << 112) | (number << 80))
    teredo = IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF))
    assert is_public(mapped) == is_public(nat64) == is_public(address)
    assert not any(map(is_public, (compatible, six_to_four, teredo)))


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "127.1",
        "127.0.1",
        "0177.0.0.1",
        "127.0.0.01",
        "127.0.0.1.",
        "1.2.3.4.5",
        "999.1.1.1",
        "a.b.0x1",
        "0X7F.1",
        "fe80::1%25eth0",
        "::1::",
    ],
)
def test_an_odd_spelling_of_an_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError):
        parse_literal(host)


@pytest.mark.parametrize("host", ["example.com", "localhost", "1.example", "x1", "ab.cd.", "7f.a"])
def test_a_name_is_no_literal(host: str) -> None:
    assert parse_literal(host) is None


@given(st.one_of(v4, v6))
def test_a_canonical_literal_is_read_as_itself(address: IPv4Address | IPv6Address) -> None:
    assert parse_literal(str(address)) == address

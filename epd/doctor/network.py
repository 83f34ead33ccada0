"""Ports and addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from epd.addresses import host_port
from epd.doctor.check import Check, Verdict

_SIOCGIFADDR = 0x8915
"""Linux, ioctl on a socket: the IPv4 address of an interface (linux/sockios.h)."""


def check_port(host: str, port: int) -> Check:
    """Whether the coordinator could listen."""
    name = "coordinator port"
    where = host_port(host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: a port that merely lingers in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            remedy = "is a coordinator running already (epd status)? Otherwise give another --port"
            return Check(name, Verdict.WARNING, f"{where}: {exc.strerror}", remedy)
    return Check(name, Verdict.OK, f"{where} is free")


def check_advertise(hostname: str | None = None, addresses: dict[str, str] | None = None) -> Check:
    """Whether other machines would find this one under its own name.

    Args:
        hostname: the machine's name if not given.
        addresses: interface → IPv4 address; the machine's, loopback left out, if not given.
    """
    name = "advertise address"
    hostname = hostname or socket.gethostname()
    addresses = interface_addresses() if addresses is None else addresses
    known = ", ".join(f"{address} ({interface})" for interface, address in addresses.items())
    first = next(iter(addresses.values()), None)
    remedy = f"for workers on other machines give --advertise {first}" if first else ""
    try:
        own = socket.gethostbyname(hostname)
    except OSError:
        return Check(name, Verdict.WARNING, f"{hostname} does not resolve", remedy)
    if first is None:
        return Check(name, Verdict.OK, f"{hostname} is {own}; no other network: this machine only")
    if ipaddress.ip_address(own).is_loopback:
        detail = f"{hostname} resolves to {own}, which only this machine reaches; it has {known}"
        return Check(name, Verdict.WARNING, detail, remedy)
    return Check(name, Verdict.OK, f"{hostname} is {own}; this machine has {known}")


def interface_addresses() -> dict[str, str]:
    """IPv4 address of each network interface that has one, loopback left out."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not ipaddress.ip_address(address).is_loopback:
                found[interface] = address
    return found

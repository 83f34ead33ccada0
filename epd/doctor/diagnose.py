"""All checks, in the order a reader would mend what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from epd.doctor.check import Check, Verdict
from epd.doctor.hardware import check_gpu, check_locked_memory, check_rdma
from epd.doctor.network import check_advertise, check_port
from epd.doctor.secret import check_token
from epd.doctor.software import check_base_packages, check_python, check_torch_packages
from epd.doctor.transfer import check_libibverbs, check_self_transfer


def diagnose(*, host: str, port: int, token_file: Path | None) -> Iterator[Check]:
    """Run the checks one by one, each yielded as it is done; a few take seconds."""
    rdma = check_rdma()
    checks: list[Callable[[], Check]] = [
        check_python,
        check_base_packages,
        check_torch_packages,
        check_libibverbs,
        check_self_transfer,
        lambda: check_port(host, port),
        check_advertise,
        lambda: check_token(token_file),
        lambda: check_locked_memory(has_rdma=rdma.verdict is Verdict.OK),
        check_gpu,
        lambda: rdma,
    ]
    for check in checks:
        yield check()

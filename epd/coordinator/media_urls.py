"""Signed, short-lived URLs under which workers fetch media from the coordinator.

The signature is the right to read one item until a moment; so an engine that cannot send our token
in a header (SGLang's encode server) can fetch too, and a URL in a log opens nothing for long.
"""

from __future__ import annotations

from epd.auth import ClusterToken
from epd.clock import Clock
from epd.errors import AuthenticationError


class MediaURLs:
    """Makes and checks media URLs."""

    def __init__(self, base_url: str, token: ClusterToken, clock: Clock, *, ttl_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._token = token
        self._clock = clock
        self._ttl_s = ttl_s

    def sign(self, content_hash: str, ttl_s: float | None = None) -> str:
        """A URL that gives the bytes with this hash for `ttl_s`, or as long as others do."""
        expires = int(self._clock.time() + (ttl_s or self._ttl_s))
        signature = self._token.sign(_text(content_hash, expires))
        path = f"/internal/media/{content_hash}?expires={expires}&signature={signature}"
        return self._base_url + path

    def check(self, content_hash: str, expires: str, signature: str) -> None:
        """Raises AuthenticationError unless the URL was signed here and is still valid."""
        is_number = expires.isascii() and expires.isdigit() and len(expires) < 12
        if not is_number or not self._token.is_signed(_text(content_hash, int(expires)), signature):
            raise AuthenticationError("the media URL is not signed by this coordinator")
        if int(expires) < self._clock.time():
            raise AuthenticationError("the media URL has expired")


def _text(content_hash: str, expires: int) -> str:
    return f"media:{content_hash}:{expires}"

"""Decodes `data:` URLs, strictly, with errors that say what to mend and never quote the content."""

from __future__ import annotations

import binascii
from urllib.parse import unquote_to_bytes

from epd.errors import MediaError

_WHITESPACE = b" \t\r\n\f"


def decode_data_url(url: str, *, max_bytes: int) -> bytes:
    """The bytes of a base64 `data:` URL (RFC 2397).

    Percent-encoding and whitespace inside the base64 are accepted, as browsers do: encoders that
    wrap lines are common. The declared type is ignored; the bytes tell.

    Raises:
        MediaError: not base64, or more than `max_bytes`, which is told from the length of the
            base64 before decoding.
    """
    head, comma, payload = url.partition(",")
    if not comma:
        raise MediaError("the data URL has no ',' before its data: send data:image/png;base64,…")
    if not head.rstrip().lower().endswith(";base64"):
        raise MediaError("the data URL is not base64: send data:image/png;base64,…")
    encoded = _clean(payload)
    num_bytes = len(encoded) // 4 * 3 - encoded[-2:].count(b"=")
    if num_bytes > max_bytes:
        raise MediaError(
            f"the image has {num_bytes} bytes, more than the {max_bytes} allowed: "
            "send a smaller one"
        )
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error:
        raise MediaError(_why_broken(encoded)) from None


def _clean(payload: str) -> bytes:
    try:
        encoded = payload.encode("ascii")
    except UnicodeEncodeError:
        raise MediaError("the data URL's base64 holds a character that is not ASCII") from None
    if b"%" in encoded:
        encoded = unquote_to_bytes(encoded)
    return encoded.translate(None, delete=_WHITESPACE)


def _why_broken(encoded: bytes) -> str:
    """Name the mistake without quoting content, which may be private."""
    if b"-" in encoded or b"_" in encoded:
        return "the data URL uses the URL-safe base64 alphabet: use the standard one ('+' and '/')"
    if len(encoded) % 4:
        return (
            f"the data URL's base64 is {len(encoded)} characters long, which is no multiple of 4: "
            "it is cut off or lacks its '=' padding"
        )
    return "the data URL's base64 is broken: it holds characters that do not belong there"

"""What the media edge accepts: sizes, time, redirects and where images may come from."""

from __future__ import annotations

from dataclasses import dataclass

from epd.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds on what a client's image reference may cost.

    Attributes:
        max_bytes: of one encoded image file.
        max_pixels: width times height of one image, checked before any decoding.
        max_images_per_request: over all messages of a request.
        timeout_s: for one fetch, redirects and name resolution included.
        max_redirects: followed per fetch, each checked like the first URL.
        max_concurrent_fetches: over all requests; bounds the memory of bytes in flight.
        allow_private_addresses: for tests and closed networks; otherwise only hosts whose every
            address is public are reached.
        allowed_domains: if not empty, only these hosts and their subdomains are reached.
        cache_bytes: budget of `MediaCache`.
    """

    max_bytes: int = 20 * MIB
    max_pixels: int = 100_000_000
    max_images_per_request: int = 64
    timeout_s: float = 10.0
    max_redirects: int = 3
    max_concurrent_fetches: int = 32
    allow_private_addresses: bool = False
    allowed_domains: tuple[str, ...] = ()
    cache_bytes: int = 1024 * MIB

    def __post_init__(self) -> None:
        for name in (
            "max_bytes",
            "max_pixels",
            "max_images_per_request",
            "timeout_s",
            "max_concurrent_fetches",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"media.{name} must be above 0", param=f"media.{name}")
        if self.max_redirects < 0:
            raise ConfigError("media.max_redirects must be 0 or more", param="media.max_redirects")
        if self.cache_bytes < self.max_bytes:
            raise ConfigError(
                f"media.cache_bytes ({self.cache_bytes}) must hold at least one image of "
                f"media.max_bytes ({self.max_bytes})",
                param="media.cache_bytes",
            )

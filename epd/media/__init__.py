"""The media edge: images in by reference, out as bytes and facts, within limits."""

from epd.media.cache import MediaCache
from epd.media.edge import MediaEdge
from epd.media.fetch import Fetcher, HttpFetcher
from epd.media.inspect import ImageFacts, inspect_image
from epd.media.item import MediaItem, build_item
from epd.media.lease import MediaLease

__all__ = [
    "Fetcher",
    "HttpFetcher",
    "ImageFacts",
    "MediaCache",
    "MediaEdge",
    "MediaItem",
    "MediaLease",
    "build_item",
    "inspect_image",
]

import pytest

from epd.errors import ConfigError
from epd.media import MediaLimits


@pytest.mark.parametrize(
    "name", ["max_bytes", "max_pixels", "max_images_per_request", "timeout_s", "max_redirects"]
)
def test_a_limit_that_cannot_work_names_itself(name: str) -> None:
    with pytest.raises(ConfigError, match=f"media.{name}"):
        MediaLimits(**{name: -1})


def test_the_cache_must_hold_one_image() -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        MediaLimits(max_bytes=100, cache_bytes=99)

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.errors import MediaError
from epd.media.data_url import decode_data_url

DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()


def decode(url: str, max_bytes: int = 1000) -> bytes:
    return decode_data_url(url, max_bytes=max_bytes)


@given(st.binary(max_size=200))
def test_what_was_encoded_comes_back(data: bytes) -> None:
    assert decode("data:image/png;base64," + base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:;base64," + BASE64,
        "data:image/png;name=a.png;base64," + BASE64,
        "DATA:IMAGE/PNG;BASE64," + BASE64,
        "data:image/png;base64," + BASE64.replace("+", "%2B").replace("/", "%2f"),
        "data:image/png;base64,\n" + base64.encodebytes(DATA).decode(),
        "data:image/png;base64,%0A " + BASE64,
    ],
)
def test_usual_variants_are_accepted(url: str) -> None:
    assert decode(url) == DATA


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("data:image/png;base64", "no ','"),
        ("data:image/png," + BASE64, "not base64"),
        ("data:image/png;base64," + BASE64[:-3], "multiple of 4"),
        ("data:image/png;base64," + BASE64.rstrip("="), "padding"),
        ("data:image/png;base64,SECRET!!", "do not belong"),
        ("data:image/png;base64,SECR=ETS", "do not belong"),
        ("data:image/png;base64,SECRETS-", "URL-safe"),
        ("data:image/png;base64,SECRETSé", "not ASCII"),
        ("data:image/png;base64,SECRET%zz", "do not belong|multiple"),
    ],
)
def test_a_broken_data_url_is_refused_without_quoting_it(url: str, hint: str) -> None:
    with pytest.raises(MediaError, match=hint) as caught:
        decode(url)
    assert "SECR" not in caught.value.message
    assert BASE64[:8] not in caught.value.message


def test_the_size_is_bounded_before_decoding() -> None:
    url = "data:;base64," + BASE64
    assert len(decode(url, max_bytes=256)) == 256
    with pytest.raises(MediaError, match="256 bytes, more than the 255"):
        decode(url, max_bytes=255)
    with pytest.raises(MediaError, match="allowed"):
        decode("data:;base64," + "!" * 4000, max_bytes=255)

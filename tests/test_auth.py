"""The cluster token and API keys."""

import os
import stat
import threading
from pathlib import Path

import pytest

from epd.auth import (
    ANONYMOUS,
    TOKEN_VARIABLE,
    APIKeys,
    Caller,
    ClusterToken,
    default_token_file,
    load_api_keys,
    load_token,
)
from epd.errors import AuthenticationError, ConfigError
from epd.types import RequestClass

SECRET = "a" * 32


@pytest.fixture(autouse=True)
def _no_token_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_a_token_accepts_its_own_header_only() -> None:
    token = ClusterToken(SECRET)
    token.check(token.headers["Authorization"])
    for header in (None, "", "Bearer", f"Bearer {SECRET}x", f"bearer {SECRET}", SECRET, "Bearer é"):
        with pytest.raises(AuthenticationError, match="missing or wrong cluster token"):
            token.check(header)


def test_a_token_never_prints_itself() -> None:
    token = ClusterToken(SECRET)
    assert SECRET not in f"{token!r} {token}"


def test_a_signature_is_bound_to_its_text_and_its_token() -> None:
    token = ClusterToken(SECRET)
    signature = token.sign("media/abc")
    assert token.is_signed("media/abc", signature)
    assert not token.is_signed("media/abd", signature)
    assert not token.is_signed("media/abc", signature[:-1] + "?")
    assert not ClusterToken("b" * 32).is_signed("media/abc", signature)
    assert not token.is_signed("media/abc", "é")


@pytest.mark.parametrize(
    "secret", ["", "short", "a" * 15, "a" * 20 + " b", "é" * 20, "a" * 20 + "\n"]
)
def test_a_weak_or_unsendable_token_is_refused(secret: str) -> None:
    with pytest.raises(ConfigError):
        ClusterToken(secret)


def test_the_token_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    first = load_token(create=True)
    path = default_token_file()
    assert path.is_relative_to(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_token().headers == first.headers
    assert load_token(create=True).headers == first.headers


def test_coordinators_that_start_together_agree_on_one_token(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    headers: list[str] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        headers.append(load_token(path, create=True).headers["Authorization"])

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(headers) == 8
    assert len(set(headers)) == 1
    assert os.listdir(path.parent) == ["token"], "no draft may stay behind"


def test_a_worker_does_not_make_a_token_but_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Start the coordinator first"):
        load_token(tmp_path / "token")
    assert not (tmp_path / "token").exists()


def test_a_token_that_cannot_be_made_or_read_is_one_line_that_quotes_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        load_token(tmp_path / "file" / "token", create=True)
    path = tmp_path / "token"
    path.write_bytes(b"secret\xff" * 8)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="it is no text") as caught:
        load_token(path)
    assert "secret" not in caught.value.message


def test_a_user_without_a_home_folder_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match=r"no home folder .* set HOME, XDG_STATE_HOME"):
        load_token(create=True)


def test_a_token_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(path)


def test_the_environment_comes_before_the_default_file_but_not_before_an_explicit_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(SECRET)
    path.chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, "b" * 32)
    assert load_token().headers == ClusterToken("b" * 32).headers
    assert load_token(path).headers == ClusterToken(SECRET).headers


def test_without_keys_every_client_may_come() -> None:
    keys = load_api_keys(None)
    assert not keys
    keys.check(None)


def test_with_keys_a_client_needs_one_of_them() -> None:
    keys = APIKeys(["one", "two"])
    for header in ("Bearer one", "bearer two", "Bearer  two "):
        keys.check(header)
    for header in (None, "", "one", "Basic one", "Bearer", "Bearer three", "Bearer One"):
        with pytest.raises(AuthenticationError, match="Authorization: Bearer YOUR_KEY"):
            keys.check(header)


def test_a_file_of_keys_may_hold_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team a\n\n one \n\ntwo\n")
    keys = load_api_keys(path)
    keys.check("Bearer one")
    with pytest.raises(AuthenticationError):
        keys.check("Bearer # team a")


def test_a_file_without_keys_does_not_open_the_door(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_api_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_api_keys(tmp_path / "nope")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        load_api_keys(path)


def test_words_after_a_key_say_who_it_is(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "# team a\n\nsk-old\nsk-a class=batch name=team-a weight=2\n"
        "  sk-b\tname=team-a weight=2.0 \n"
    )
    keys = load_api_keys(path)
    assert keys.check("Bearer sk-old") == Caller("key-3")
    assert keys.check("Bearer sk-a") == Caller("team-a", 2.0, RequestClass.BATCH)
    assert keys.check("Bearer sk-b") == Caller("team-a", 2.0)
    assert load_api_keys(None).check(None) == ANONYMOUS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("extra", "after the key only class=..., name=... and weight=... may follow"),
        ("Name=a", "only class"),
        ("name=a name=b", "each once"),
        ("class=urgent", "class must be interactive or batch"),
        ("class=", "class must be"),
        ("weight=0", "weight must be a number from 0.001 to 1000"),
        ("weight=nan", "weight must be"),
        ("weight=much", "weight must be"),
        ("name=", "name must be 1 to 64"),
        ("name=a/b", "name must be"),
        ("name=twice weight=2", "twice has another weight on an earlier line"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_only(tmp_path: Path, words: str, message: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"sk-first name=twice\n# no key\nsk-secret-part {words}\n")
    with pytest.raises(ConfigError, match=f"api_keys_file: .*: line 3: .*{message}") as caught:
        load_api_keys(path)
    assert "sk-" not in str(caught.value).replace(str(path), "")
    assert "extra" not in str(caught.value)


def test_a_key_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-a\nsk-a\n")
    assert load_api_keys(path).check("Bearer sk-a") == Caller("key-1")
    path.write_text("sk-a\nsk-a class=batch\n")
    with pytest.raises(ConfigError, match="line 2: the key is on an earlier line already"):
        load_api_keys(path)

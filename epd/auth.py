"""Who may talk to whom: the cluster token, the URLs signed with it, and clients' API keys.

The cluster token is one secret shared by the coordinator and its workers. By default it lives in a
file only its owner can read and is made on first use, so that processes of one user on one machine
find each other without set-up and nobody else can join. Elsewhere it comes by
`EPD_CLUSTER_TOKEN` or `--token-file`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from epd.errors import AuthenticationError, ConfigError
from epd.types import RequestClass

TOKEN_VARIABLE = "EPD_CLUSTER_TOKEN"
_MIN_TOKEN_CHARS = 16


class ClusterToken:
    """The secret, and what is derived from it. It never prints itself."""

    def __init__(self, secret: str) -> None:
        if len(secret) < _MIN_TOKEN_CHARS:
            raise ConfigError(f"the cluster token is shorter than {_MIN_TOKEN_CHARS} characters")
        if not (secret.isascii() and secret.isprintable()) or " " in secret:
            raise ConfigError("the cluster token must be printable ASCII without spaces")
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "ClusterToken(***)"

    @property
    def headers(self) -> dict[str, str]:
        """The header that a worker or the coordinator sends with each internal request."""
        return {"Authorization": f"Bearer {self._secret.decode()}"}

    def check(self, authorization: str | None) -> None:
        """Raises AuthenticationError unless `authorization` is our bearer header."""
        expected = self.headers["Authorization"].encode()
        if not hmac.compare_digest(_header_bytes(authorization), expected):
            raise AuthenticationError(
                "missing or wrong cluster token: coordinator and workers must share one "
                f"({TOKEN_VARIABLE} or --token-file)"
            )

    def sign(self, text: str) -> str:
        """A signature that only holders of the token can make; 32 hex characters."""
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()[:32]

    def is_signed(self, text: str, signature: str) -> bool:
        """Whether `signature` is `sign(text)`."""
        return hmac.compare_digest(self.sign(text).encode(), _header_bytes(signature))


def default_token_file() -> Path:
    """Where the token lives if nobody says otherwise.

    Raises:
        ConfigError: this user has no home folder, as in many containers.
    """
    state = os.environ.get("XDG_STATE_HOME")
    try:
        root = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError as exc:
        raise ConfigError(
            "this user has no home folder for the cluster token: set HOME, XDG_STATE_HOME or "
            f"{TOKEN_VARIABLE}, or give --token-file"
        ) from exc
    return root / "epd" / "cluster-token"


def load_token(token_file: Path | None = None, *, create: bool = False) -> ClusterToken:
    """Read the cluster token; environment first, then the file.

    Args:
        token_file: where it is; `default_token_file()` if not given.
        create: make the file if it does not exist (the coordinator does, a worker does not).

    Raises:
        ConfigError: there is no token or none can be made, it is too weak, or others can read its
            file.
    """
    if token_file is None and (secret := os.environ.get(TOKEN_VARIABLE)):
        return ClusterToken(secret.strip())
    path = token_file or default_token_file()
    try:
        if create and not path.exists():
            _create_token(path)
    except OSError as exc:
        raise ConfigError(
            f"the cluster token {path} cannot be made ({exc.strerror}): set XDG_STATE_HOME or "
            f"{TOKEN_VARIABLE}, or give --token-file"
        ) from exc
    try:
        secret = path.read_text().strip()
        is_private = path.stat().st_mode & 0o077 == 0
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"no cluster token: {path} cannot be read ({_why(exc)}). Start the coordinator "
            f"first, or set {TOKEN_VARIABLE} or --token-file to the coordinator's token"
        ) from exc
    if not is_private:
        raise ConfigError(f"others can read the cluster token: run chmod 600 {path}")
    return ClusterToken(secret)


def _create_token(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Written beside and linked into place: a second coordinator starting now must not read half.
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, as far as its key tells. Never the key."""

    name: str
    """The tenant: callers of one name share what is theirs."""
    weight: float = 1.0
    """Its share of the fleet, next to the weights of others who wait."""
    request_class: RequestClass | None = None
    """The best class it may ask for, and the one it gets if it does not; None allows any."""


ANONYMOUS = Caller("anonymous")
"""A client where no keys are asked for."""
CLUSTER = Caller("cluster")
"""Who holds the cluster token."""


class APIKeys:
    """Keys that clients present. Only their hashes are kept in memory.

    Args:
        lines: of a key file: a key, and perhaps words after it, as in `KEY name=team-a weight=2`.
            Blank lines and those that start with # are skipped.

    Raises:
        ConfigError: a line cannot be read; the message names its number, and no word of it.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._callers: dict[bytes, Caller] = {}
        weights: dict[str, float] = {}
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            caller = _read_caller(words[1:], number)
            digest = hashlib.sha256(words[0].encode()).digest()
            if digest in self._callers and len(words) > 1:
                raise ConfigError(f"line {number}: the key is on an earlier line already")
            if weights.setdefault(caller.name, caller.weight) != caller.weight:
                raise ConfigError(
                    f"line {number}: {caller.name} has another weight on an earlier line; "
                    "give all keys of one name the same"
                )
            self._callers.setdefault(digest, caller)

    def __bool__(self) -> bool:
        return bool(self._callers)

    def check(self, authorization: str | None) -> Caller:
        """Who presents `authorization`; ANONYMOUS if no keys are configured.

        Raises:
            AuthenticationError: it is no bearer header with one of the keys.
        """
        if not self._callers:
            return ANONYMOUS
        scheme, _, key = _header_bytes(authorization).partition(b" ")
        caller = self._callers.get(hashlib.sha256(key.strip()).digest())
        if scheme.lower() != b"bearer" or caller is None:
            raise AuthenticationError(
                "missing or wrong API key: send the header Authorization: Bearer YOUR_KEY"
            )
        return caller


def _read_caller(words: Sequence[str], number: int) -> Caller:
    """What the words after a key say. A word is never shown: it may be part of a key."""
    settings: dict[str, str] = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark or name not in ("name", "class", "weight") or name in settings:
            raise ConfigError(
                f"line {number}: after the key only class=..., name=... and weight=... may follow, "
                "each once; a key has no spaces"
            )
        settings[name] = value
    name = settings.get("name", f"key-{number}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"line {number}: name must be 1 to 64 of A-Z a-z 0-9 . _ -")
    try:
        weight = float(settings.get("weight", "1"))
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"line {number}: weight must be a number from 0.001 to 1000")
    given = settings.get("class")
    if given is not None and given not in tuple(RequestClass):
        raise ConfigError(f"line {number}: class must be {' or '.join(RequestClass)}")
    return Caller(name, weight, None if given is None else RequestClass(given))


def _header_bytes(text: str | None) -> bytes:
    """What a peer sent, which may be no valid UTF-8: aiohttp decodes it with surrogates."""
    return (text or "").encode(errors="surrogateescape")


def load_api_keys(path: Path | None) -> APIKeys:
    """Read the API keys of a file; see `APIKeys` for its lines.

    Raises:
        ConfigError: the file cannot be read, has a wrong line, or holds no key.
    """
    if path is None:
        return APIKeys([])
    try:
        keys = APIKeys(path.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"api_keys_file: {path} cannot be read ({_why(exc)})") from exc
    except ConfigError as exc:
        raise ConfigError(f"api_keys_file: {path}: {exc.message}") from None
    if not keys:
        raise ConfigError(f"api_keys_file: {path} holds no key")
    return keys


def _why(exc: OSError | UnicodeDecodeError) -> str:
    """Never the exception's own text: that of a decoding error quotes the file, a secret."""
    return exc.strerror or "unknown" if isinstance(exc, OSError) else "it is no text"

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
import secrets
from pathlib import Path

from epd.errors import AuthenticationError, ConfigError

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


class APIKeys:
    """Keys that clients present. Only their hashes are kept in memory."""

    def __init__(self, keys: list[str]) -> None:
        self._hashes = {hashlib.sha256(key.encode()).digest() for key in keys}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def check(self, authorization: str | None) -> None:
        """Raises AuthenticationError unless no keys are configured or the bearer is one of them."""
        if not self._hashes:
            return
        scheme, _, key = _header_bytes(authorization).partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        if scheme.lower() != b"bearer" or digest not in self._hashes:
            raise AuthenticationError(
                "missing or wrong API key: send the header Authorization: Bearer YOUR_KEY"
            )


def _header_bytes(text: str | None) -> bytes:
    """What a peer sent, which may be no valid UTF-8: aiohttp decodes it with surrogates."""
    return (text or "").encode(errors="surrogateescape")


def load_api_keys(path: Path | None) -> APIKeys:
    """Read API keys, one per line; blank lines and lines that start with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if path is None:
        return APIKeys([])
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"api_keys_file: {path} cannot be read ({_why(exc)})") from exc
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_keys_file: {path} holds no key")
    return APIKeys(keys)


def _why(exc: OSError | UnicodeDecodeError) -> str:
    """Never the exception's own text: that of a decoding error quotes the file, a secret."""
    return exc.strerror or "unknown" if isinstance(exc, OSError) else "it is no text"

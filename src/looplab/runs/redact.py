"""Recognise secrets and replace them before anything is written; secrets are never recorded.

A secret is recognised in three ways: by the name of its variable, flag or key (`WANDB_API_KEY`, `--password`,
`db.pass`), by its shape (`sk-…`, `ghp_…`, the password in a URL), and by its value, once it has been seen in an
environment variable or a base config (`remember`).

There are two kinds of names. The value of `password` or `api_key` is always a secret. `key`, `token` and `auth` are
also machine-learning terms (`pad_token`, `sort_key`): in a config or on a command line, their value is a secret only if
it looks like one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from looplab.config.files import dump_json
from looplab.untrusted import UntrustedError, load_json, mend_text, open_regular

HIDDEN = "***"
SHORTEST = 8
"""Minimum length of a known value to be hidden wherever it occurs; shorter texts occur by chance."""

CHUNK = 1 << 20
SHAPED = 4 << 20
"""Size in bytes above which a file is searched only for known values at the end of a run; `doctor` searches it all."""

# -- names

ALWAYS = {
    "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASSCODE", "PASS", "PWD", "PAT", "SECRET", "SECRETS", "SSHPASS",
    "APIKEY", "APIKEYS", "APITOKEN", "ACCESSKEY", "ACCESSTOKEN", "AUTHTOKEN", "SECRETKEY", "PRIVATEKEY",
    "CREDENTIAL", "CREDENTIALS", "CREDS", "COOKIE", "COOKIES", "WEBHOOK", "WEBHOOKS", "DSN",
}  # fmt: skip
"""Words whose value is always a secret."""
SOMETIMES = {"KEY", "TOKEN", "AUTH", "AUTHORIZATION", "BEARER", "JWT"}
"""Ambiguous words. An environment variable with such a name counts as a secret."""
RARELY = {"SESSION", "PRIVATE", "SIGNATURE", "SIG", "NETRC", "LICENSE", "SALT"}
"""Words whose values are secrets only if they look like one, even in the environment."""
MANY = {"KEYS": "KEY", "TOKENS": "TOKEN"}
QUALIFIERS = {
    "API", "ACCESS", "SECRET", "PRIVATE", "AUTH", "ENCRYPTION", "SIGNING", "MASTER", "SERVICE", "ACCOUNT", "BOT",
    "BEARER", "REFRESH", "CLIENT", "SSH", "DEPLOY", "HMAC", "LICENSE",
}  # fmt: skip
"""Words before `key` or `token` that make it a secret; `max_tokens` and `num_keys` are not."""
TRAILING = {
    "ID", "VALUE", "VAL", "B", "BASE", "JSON", "PEM", "HEX", "HASH", "HEADER", "STRING", "STR", "PROD", "DEV", "TEST",
    "STAGING", "OLD", "NEW", "PRIMARY", "SECONDARY", "CONFIG", "V",
}  # fmt: skip
"""Trailing words that are ignored: `AWS_ACCESS_KEY_ID` is a secret; `key_dim` and `TOKEN_FILE` are not."""
FILTERS = {
    "LOW", "HIGH", "BAND", "ALL", "FORWARD", "BACKWARD", "FIRST", "SECOND", "THIRD", "LAST", "ONE", "TWO", "SINGLE",
    "DOUBLE", "MULTI", "NUM", "N", "PER", "EACH", "BY",
}  # fmt: skip
"""Words before `pass` that make it harmless: `low_pass`, `forward_pass`."""
SHELL = {"PWD", "OLDPWD"}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@lru_cache(maxsize=4096)
def name_strength(name: str) -> int:
    """Return how strongly a name suggests a secret: 3 always, 2 in the environment, 1 maybe, 0 not at all."""
    if name.strip("-") in SHELL:
        return 0
    words = [word.upper() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1] in TRAILING or words[-1].isdigit()):
        words.pop()
    if words[-1:] in (["URL"], ["URI"]) and words[-2:-1] in (["WEBHOOK"], ["HOOK"]):
        return 3
    if not words:
        return 0
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in MANY and before in QUALIFIERS:
        last = MANY[last]
    if last in ("KEY", "TOKEN") and before in QUALIFIERS:
        return 3
    if last == "PASS" and before in FILTERS:
        return 0
    if last in ALWAYS or last.endswith(("PASSWORD", "PASSWD", "PWD")):
        return 3
    return 2 if last in SOMETIMES else 1 if last in RARELY else 0


def is_secret_name(name: str) -> bool:
    """Return whether the environment variable of this name is a secret: `HF_TOKEN` is, `MAX_TOKENS` is not."""
    return name_strength(name) >= 2


_RANDOM = re.compile(r"(?<![A-Za-z0-9])(?=[A-Za-z]*+[0-9])(?=[0-9]*+[A-Za-z])[A-Za-z0-9]{12,}+")
_MIXED = re.compile(r"(?=[^0-9]*+[0-9])(?=[^a-z]*+[a-z])(?=[^A-Z]*+[A-Z])[\w+=~-]{12,}+", re.ASCII)
_REFERENCE = re.compile(r"\$|<|env:|file:|op://|vault:|none$|null$|true$|false$|auto$", re.IGNORECASE)


def is_secret(name: str, value: object) -> bool:
    """Return whether the value of this config key or flag is a secret.

    References to a variable (`${WANDB_API_KEY}`) and short numbers are not.
    """
    if value is None or isinstance(value, bool | float | list | dict):
        return False
    strength = name_strength(name)
    if strength == 0:
        return False
    if isinstance(value, int):
        return strength == 3 and len(str(value)) >= 6 if abs(value) < 10**30 else strength == 3
    text = str(value)
    if not text or text == HIDDEN or _REFERENCE.match(text):
        return False
    return strength == 3 or _RANDOM.search(text) is not None or _MIXED.fullmatch(text) is not None


# -- shapes

Shape = tuple[tuple[str, ...], re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _shape(hints: str, pattern: str, hidden: str | Callable[[re.Match[str]], str] = HIDDEN, flags: int = 0) -> Shape:
    return tuple(hints.split()), re.compile(pattern, re.ASCII | flags), hidden


def _hide_assigned(found: re.Match[str]) -> str:
    """Hide the value of `password=…`; of `password: …` only if it is quoted or not a plain word."""
    value = found["value"]
    if value.startswith((HIDDEN, "$", "<", "{")) or value.lower() in ("none", "null", "true", "false"):
        return found[0]
    if ":" in found["sign"] and not found["quote"] and value.isalpha():
        return found[0]
    return f"{found['name']}{found['sign']}{found['quote']}{HIDDEN}"


_NOT_WORD = r"(?<![A-Za-z0-9])"
SHAPES: tuple[Shape, ...] = (
    # A literal of each shape is searched first: texts without any of them cost almost nothing.
    _shape("sk-", _NOT_WORD + r"sk-(?:(?:ant|proj|svcacct|admin|or|lf)-[\w-]{20,}+|[A-Za-z0-9]{16,}+)"),
    _shape("hf_ gsk_ npm_ r8_", _NOT_WORD + r"(?:hf|gsk|npm|r8)_[A-Za-z0-9]{20,}+"),
    _shape("ghp_ gho_ ghu_ ghs_ ghr_", _NOT_WORD + r"gh[pousr]_[A-Za-z0-9]{20,}+"),
    _shape("github_pat_", r"github_pat_\w{20,}+"),
    _shape("glpat-", r"glpat-[\w-]{16,}+"),
    _shape("xox xapp-", _NOT_WORD + r"(?:xox[abeoprs]|xapp)-[\w-]{10,}+"),
    _shape("AKIA ASIA", _NOT_WORD + r"A(?:KIA|SIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _shape("AIza", _NOT_WORD + r"AIza[\w-]{30,}+"),
    _shape("ya29.", _NOT_WORD + r"ya29\.[\w-]{20,}+"),
    _shape("nvapi- pypi- tvly- pplx-", _NOT_WORD + r"(?:nvapi|pypi|tvly|pplx)-[\w-]{24,}+"),
    _shape("wandb_v1_", r"wandb_v1_\w{20,}+"),
    _shape("dop_v1_ lsv2_", _NOT_WORD + r"(?:dop_v1|lsv2_\w\w)_\w{30,}+"),
    _shape("_live_", _NOT_WORD + r"[rsp]k_live_\w{16,}+"),
    _shape("SG.", _NOT_WORD + r"SG\.[\w-]{16,}+\.[\w-]{16,}+"),
    _shape("eyJ", _NOT_WORD + r"eyJ[\w-]{10,}+\.[\w-]{10,}+\.[\w-]{5,}+"),
    _shape(
        "PRIVATE",
        r"-----BEGIN (?:[A-Z0-9]++ ){0,3}?PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[^-]|-(?!----))*+(?:-----END (?:[A-Z0-9]++ ){0,3}?PRIVATE KEY(?: BLOCK)?-----)?",
    ),
    # URLs
    _shape("://", r"(?<=://)([^/\s:@\"'<>]*+):[^/\s@\"'<>]++(?=@)", rf"\1:{HIDDEN}"),
    _shape("://", r"(?<=://)[A-Za-z0-9_-]{20,}+(?=@)"),
    _shape("://", r"(?<=hooks\.slack\.com/)(\w++)/[\w/-]++", rf"\1/{HIDDEN}"),
    _shape("://", r"(?<=/api/webhooks/)\d++/[\w-]++"),
    _shape("://", r"(?<=/webhookb2/)[\w@/-]++"),
    _shape("://", r"(?<=/bot/v2/hook/)[\w-]++"),
    _shape("://", r"(?<=/with/key/)[\w-]++"),
    _shape("://", r"(?<=/bot)\d{6,}+:[\w-]{20,}+"),
    _shape(
        "? &",
        r"(?<=[?&])(?P<name>(?:[\w-]{0,40}?(?:token|signature|credential|secret|password|passwd)|sig|auth|key"
        r"|api[_-]?key|access[_-]?key|AWSAccessKeyId))=[^&\s\"'#<>]{6,}+",
        rf"\g<name>={HIDDEN}",
        re.IGNORECASE,
    ),
    # Headers and assignments in text
    _shape(
        "bearer authorization",
        r"(?<![A-Za-z])(bearer|authorization[\"']?\s?[:=]\s?[\"']?\w{1,10}) "
        r"(?=[\w.~+/=-]{0,200}?[0-9])[\w.~+/-]{16,}+=*+",
        rf"\1 {HIDDEN}",
        re.IGNORECASE,
    ),
    _shape(
        "passw passph secret _key -key ikey skey ekey _token -token stoken htoken itoken",
        r"(?P<name>api[_-]?keys?|(?:access|secret|private)[_-]?key|(?:access|auth|api|refresh|bot)[_-]?token"
        r"|password|passwd|passphrase|secret)(?P<sign>[\"']?\s{0,2}[=:]\s{0,2}|@\w{2,4}=)"
        r"(?P<quote>\\?[\"']?)(?P<value>[^\s\"',;&|<>\])}\\]{4,}+)",
        _hide_assigned,
        re.IGNORECASE,
    ),
)
"""Literals that every match contains, the pattern, and its replacement. Every pattern takes linear time: repetitions
are possessive or bounded."""

_EXACT_HINTS = tuple({hint for hints, pattern, _ in SHAPES for hint in hints if not pattern.flags & re.IGNORECASE})
_LOWERED_HINTS = tuple({hint for hints, pattern, _ in SHAPES for hint in hints if pattern.flags & re.IGNORECASE})
_known: tuple[str, ...] | None = None
"""Values to hide wherever they occur, longest first; None: the environment has not been searched yet."""


def remember(env: Mapping[str, str], values: Iterable[str] = ()) -> None:
    """Hide the secrets of an environment and these values in all texts from now on."""
    global _known
    found = {os.fsdecode(secret) for secret in known_secrets(env)}
    found |= {form for value in values if len(value) >= SHORTEST for form in _forms(value)}
    _known = tuple(sorted({*remembered(), *found}, key=len, reverse=True))


def remembered() -> tuple[str, ...]:
    """Return the values to hide wherever they occur; initially those of this process's environment."""
    global _known
    if _known is None:
        _known = tuple(map(os.fsdecode, known_secrets()))
    return _known


def forget() -> None:
    """Forget all remembered values; for tests."""
    global _known
    _known = None


def redact_text(text: str) -> str:
    """Return the text without secrets."""
    if len(text) < SHORTEST:
        return text
    text = hide_known(text, remembered())
    lowered = text.lower()
    if any(map(text.__contains__, _EXACT_HINTS)) or any(map(lowered.__contains__, _LOWERED_HINTS)):
        for hints, pattern, hidden in SHAPES:
            searched = lowered if pattern.flags & re.IGNORECASE else text
            if any(map(searched.__contains__, hints)):
                text = pattern.sub(hidden, text)
    return text


_JSON_ESCAPE = re.compile(r"\\++(?:u([0-9a-fA-F]{4})|([\"/]))|\\{2,}+")


def hide_known(text: str, values: Iterable[str]) -> str:
    """Return the text with these values hidden, even if JSON has escaped some of their characters."""
    values = list(values)
    for value in values:
        if value in text:
            text = text.replace(value, HIDDEN)
    if "\\" in text:
        plain = _JSON_ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2] or "\\", text)
        for value in values:
            if value in plain:
                text = _escaped(value).sub(HIDDEN, text)
    return text


@lru_cache(maxsize=256)
def _escaped(value: str) -> re.Pattern[str]:
    """Return a pattern for a value in JSON, or in JSON inside JSON: every character literal or escaped."""
    parts = (r"\\++" if c == "\\" else rf"\\*+{re.escape(c)}" for c in value)
    return re.compile("".join(rf"(?:{part}|\\++u(?i:{ord(c):04x}))" for part, c in zip(parts, value, strict=True)))


def redact_bytes(data: bytes, secrets: Iterable[bytes] = ()) -> bytes:
    """Return the content of a file without secrets: these, the remembered ones, and texts that look like one."""
    for secret in (*secrets, *map(_encoded, remembered())):
        if secret in data:
            data = data.replace(secret, HIDDEN.encode())
    text = data.decode("latin-1")  # every byte is one character, whatever the encoding
    clean = redact_text(text)
    return data if clean is text or clean == text else clean.encode("latin-1")


def redact_data(data: Any, name: str = "") -> Any:
    """Return plain data (dicts, lists, texts) without secrets, recognised by key names and by the texts themselves;
    keys are texts too.

    Data without secrets is returned itself, not copied.
    """
    if isinstance(data, str):
        return HIDDEN if name and is_secret(name, data) else redact_text(data)
    if isinstance(data, dict):
        changed = {}
        for key, value in data.items():
            clean = redact_data(value, key if isinstance(key, str) else "")
            if clean is not value and clean != value:
                changed[key] = clean
        return redact_keys({**data, **changed} if changed else data)
    if isinstance(data, list | tuple):
        parts = [redact_data(value, name) for value in data]
        return data if parts == list(data) else type(data)(parts)
    return HIDDEN if name and is_secret(name, data) else data


def redact_keys(data: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict without secrets in its keys; the same dict if it has none. Its values are kept."""
    joined = "\n".join(key for key in data if isinstance(key, str))  # a single search suffices for most
    if redact_text(joined) == joined:
        return data
    return {redact_text(key) if isinstance(key, str) else key: value for key, value in data.items()}


def redact_edit(edit: str) -> str:
    """Return an edit (`path@op=value`) without secrets."""
    return redact_text(_hide_named(edit))


def _hide_named(edit: str) -> str:
    name, sign, value = edit.partition("=")
    if sign and is_secret(_key_of(name.partition("@")[0]), value.strip("\"'")):
        return f"{name}={HIDDEN}"
    return edit


def redact_edits(edits: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(redact_edit, edits))


def redact_proposal(edits: Iterable[str], reason: str, hypothesis: str) -> tuple[tuple[str, ...], str, str]:
    """Return the texts of a proposal without secrets."""
    edits = tuple(edits)
    joined = "\n".join((*edits, reason, hypothesis))  # a single search suffices for most
    if redact_text(joined) == joined:
        return tuple(map(_hide_named, edits)), reason, hypothesis
    return redact_edits(edits), redact_text(reason), redact_text(hypothesis)


def _key_of(path: str) -> str:
    """Return the last segment of a dotted path."""
    return path.rpartition(".")[2]


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: HIDDEN if value and (is_secret_name(name) or is_secret(name, value)) else redact_text(value)
        for name, value in env.items()
    }


_FLAG = re.compile(r"(?P<name>(?:--?|\+{1,2}|~)?[\w.@/-]++)=(?P<value>.*+)", re.DOTALL)


def redact_argv(argv: Iterable[str]) -> list[str]:
    """Return the arguments without secrets: `--api-key=x`, `--api-key x`, `logger.api_key=x`, and by their shape."""
    argv = list(argv)
    joined = "\n".join(argv)
    shaped = redact_text(joined) != joined  # a single search suffices for most
    clean: list[str] = []
    name = ""  # of the previous flag, if its value comes next
    for part in argv:
        flag = _FLAG.fullmatch(part)
        if name and not part.startswith("--") and is_secret(name, part):
            clean.append(HIDDEN)
        elif flag and is_secret(_key_of(flag["name"].partition("@")[0]), flag["value"]):
            clean.append(f"{flag['name']}={HIDDEN}")
        else:
            clean.append(redact_text(part) if shaped else part)
        name = _key_of(part.lstrip("-")) if part.startswith("-") and not flag else ""
    return clean


def known_secrets(env: Mapping[str, str] | None = None) -> list[bytes]:
    """Return the secrets of an environment that a trainer could print, longest first."""
    found: set[str] = set()
    for name, value in (os.environ if env is None else env).items():
        if len(value) < SHORTEST:
            continue
        if (is_secret_name(name) and not value.startswith("/")) or is_secret(name, value):
            found.update(_forms(value))
        for part in _secret_parts(value):  # parts may be printed alone
            if len(part) >= SHORTEST:
                found.update(_forms(part))
    return sorted(map(_encoded, found), key=len, reverse=True)


def _forms(value: str) -> set[str]:
    """Return a value as it is, as part of a JSON text, and as part of a URL."""
    if value.isalnum() and value.isascii():
        return {value}
    from urllib.parse import quote

    in_json = {json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    in_path, in_query = (quote(_encoded(value), safe=safe) for safe in ("/", ""))
    return {value, *in_json, in_path, in_query, in_query.replace("%20", "+")}


def _secret_parts(value: str) -> Iterator[str]:
    """Yield the secrets in a compound value: the password in a URL, parts of JSON or of `a=b;c=d`."""
    if "://" in value:
        yield from _URL_PASSWORD.findall(value)
    if ";" in value:
        for part in value.split(";"):
            name, _, text = part.strip().partition("=")
            if is_secret(name, text):
                yield text
    if value[:1] in "{[":
        with contextlib.suppress(UntrustedError):
            secrets: dict[Place, Any] = {}
            _hide(load_json(value), (), secrets, shapes=False)
            yield from (text for text in secrets.values() if isinstance(text, str))


_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@\"'<>]*+:([^/\s@\"'<>]++)(?=@)")


def _encoded(value: str) -> bytes:
    """Return the bytes of a variable as a child process receives them."""
    try:
        return os.fsencode(value)
    except UnicodeEncodeError:
        return mend_text(value).encode()


def scrub_file(path: Path, secrets: Sequence[bytes] = ()) -> bool:
    """Hide secrets in a finished file; return whether there were any.

    Hides these secrets, the remembered ones and, unless the file is large, texts that look like one. All other bytes
    are kept. Works in chunks and writes only if there is something to replace.

    Raises:
        OSError: The file cannot be read or rewritten.
        UntrustedError: It is not a regular file.
    """
    known = sorted({*secrets, *map(_encoded, remembered())}, key=len, reverse=True)
    try:
        with open_regular(path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= SHAPED:
                data = file.read(size)
                content = redact_bytes(data, known)
                if content != data:
                    _replace(path, lambda clean: clean.write(content))
                return content != data
            if not known or not _has_any(file, known):
                return False
            file.seek(0)
            _replace(path, lambda clean: _copy_clean(file, clean, known))
    except FileNotFoundError:
        return False
    return True


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")  # removed by `sweep` after a crash
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as clean:
            write(clean)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def _has_any(file: BinaryIO, secrets: Sequence[bytes]) -> bool:
    overlap = max(map(len, secrets)) - 1
    window = b""
    while chunk := file.read(CHUNK):
        window = window[-overlap:] + chunk
        if any(secret in window for secret in secrets):
            return True
    return False


def _copy_clean(file: BinaryIO, clean: BinaryIO, secrets: Sequence[bytes]) -> None:
    longest = max(map(len, secrets))
    rest = b""
    while True:
        chunk = file.read(CHUNK)
        data = rest + chunk
        # A secret that begins before this position is completely in the data.
        decided = len(data) - longest + 1 if chunk else len(data)
        ahead = {secret: data.find(secret) for secret in secrets}
        done = 0
        while (found := [(at, -len(secret)) for secret, at in ahead.items() if at >= 0]) and min(found)[0] < decided:
            at, size = min(found)
            clean.write(data[done:at] + HIDDEN.encode())
            done = at - size
            ahead = {secret: data.find(secret, done) if 0 <= at < done else at for secret, at in ahead.items()}
        decided = max(done, decided)
        clean.write(data[done:decided])
        rest = data[decided:]
        if not chunk:
            return


# -- configs


Place = tuple[str | int, ...]
"""The keys and indices that lead to a value."""


def hide_values(config: dict[str, Any]) -> tuple[dict[str, Any], dict[Place, Any]]:
    """Return a config with hidden secrets, and the secrets by their paths; the same config if it has none."""
    secrets: dict[Place, Any] = {}
    text = dump_json(config).decode()
    hidden = _hide(config, (), secrets, shapes=redact_text(text) != text)
    return hidden, secrets


def _hide(node: Any, path: Place, secrets: dict[Place, Any], *, shapes: bool, name: str = "") -> Any:
    before = len(secrets)
    if isinstance(node, Mapping):
        copied = {key: _hide(value, (*path, key), secrets, shapes=shapes, name=key) for key, value in node.items()}
        return copied if len(secrets) > before else node
    if isinstance(node, list):
        parts = [_hide(value, (*path, i), secrets, shapes=shapes, name=name) for i, value in enumerate(node)]
        return parts if len(secrets) > before else node
    if is_secret(name, node) or (shapes and isinstance(node, str) and redact_text(node) != node):
        secrets[path] = node
        return HIDDEN
    return node


# -- files

_SECRET_FILES = re.compile(
    r"(?:\.env(?:\..*)?|.*\.env|.*\.(?:pem|key|p12|pfx|jks|keystore|kdbx|ppk)|id_(?:rsa|dsa|ecdsa|ed25519)(?:_\w+)?"
    r"|credentials.*|.*[._-]credentials(?:\..*)?|\.?netrc|_netrc|\.pgpass|\.htpasswd|\.git-credentials|\.pypirc|\.npmrc"
    r"|secrets?(?:\..*)?|.*[._-]secrets?\.(?:ya?ml|json|toml|ini|cfg|txt)|service[_-]account.*\.json"
    r"|kubeconfig|wandb_settings)",
    re.IGNORECASE | re.DOTALL,
)
_TEMPLATES = (".example", ".sample", ".template", ".dist", ".py", ".md", ".pub")


def is_secret_file(name: str) -> bool:
    """Return whether a file of this name usually contains secrets: `.env`, `server.pem`, `secrets.yaml`."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return not last.lower().endswith(_TEMPLATES) and _SECRET_FILES.fullmatch(last) is not None

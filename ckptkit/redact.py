"""Removes credentials from output, and escapes characters that control a terminal or change the text direction."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

MASK = "***"
_MAX_KNOWN = 4096

# Control characters except tab and newline (C0, DEL, C1), line separators, bidirectional controls, lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_NAMES = (
    r"secret|passw(?:or)?d|passphrase|signature|credential|connection_?string|authorization|cookie|"
    r"(?:session|security|access|auth|refresh|sas|hf|api)[_-]?token|"
    r"(?:access|account|api|private|secret|storage|shared)[_-]?key"
)
# Names of file system options that hold secrets. A bare "key" is the access key of s3fs.
_SECRET_OPTION = re.compile(rf"(?i){_NAMES}|token|^(?:key|auth|pwd|pass|sas|sig)$|[_-](?:key|auth|sas|sig|pwd)$")
_SECRET_VARIABLE = re.compile(
    r"(?i)(?:SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|_KEY|SAS|CREDENTIAL|CONNECTION_STRING)(?:_ID)?$"
)
_NO_SECRETS = frozenset(  # login methods and placeholders
    ["anon", "cloud", "cache", "google_default", "browser", "service_account", "authorized_user", "default", "false",
     "none", "null", "true"]
)  # fmt: skip
_SHORTEST_OPTION, _SHORTEST_VARIABLE = 4, 8  # shorter values would match ordinary words
_START = r"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{2}))"
_LONG = 12  # values at least this long are also masked inside longer words

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:/{1,3})([^\s'\"<>`\\]+)")
_QUERY = re.compile(r"([?&;]|^)([^=&;?]+)=([^&;]*)")
_PLAIN_QUERY = frozenset(["versionid", "version", "revision", "region", "endpoint_url", "download"])
# "token" must be the whole name: a model's cls_token is not a secret.
_ASSIGNED = re.compile(rf"(?i)((?<![\w-])(?:[\w-]*(?:{_NAMES})[\w-]*|token|sig|sas)=)(?!\*\*\*)[^\s\"'&,;)}}\]]+")
_QUOTED = re.compile(rf"(?i)([\"'][\w-]*(?:{_NAMES})[\w-]*[\"']\s*[:=]\s*[\"'])(?!\*\*\*)[^\"']+")
_BEARER = re.compile(r"(?i)\b(authorization:?\s+\w+\s+|bearer\s+|basic\s+(?=[a-z0-9+/=_-]{16}))[^\s\"',;)]+")
# In URLs with these schemes, the text before "@" is a container or a repo (container@account, repo@revision), not a
# login.
_PLACE_BEFORE_AT = frozenset(
    ["file", "local", "abfs", "abfss", "wasb", "wasbs", "az", "adl", "hf", "git", "git+https", "git+ssh"]
)

_LOCAL = frozenset(["file", "local"])

_known: dict[str, None] = {}  # an ordered set


def keep_secret(options: Any) -> None:
    """Remember the values of options whose names suggest a secret, such as "password". Options may be nested.

    From then on, `without_secrets` removes these values from every text, such as an error message of another library.
    """
    for value in _values(options, secret=False):
        if len(value) >= _SHORTEST_OPTION and value.lower() not in _NO_SECRETS and len(_known) < _MAX_KNOWN:
            _known[value] = None


def masked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with "***" in place of each value whose name suggests a secret, such as "password".

    Options may be nested.
    """
    return {
        name: MASK
        if _SECRET_OPTION.search(str(name)) and str(value).lower() not in _NO_SECRETS
        else masked(value)
        if isinstance(value, Mapping)
        else without_secrets(value)
        if isinstance(value, str)
        else value
        for name, value in options.items()
    }


def _values(options: Any, *, secret: bool, depth: int = 0) -> Iterable[str]:
    if depth > 8:
        return
    if isinstance(options, Mapping):
        for name, value in options.items():
            inside = secret or bool(_SECRET_OPTION.search(str(name)))
            yield from _values(value, secret=inside, depth=depth + 1)
    elif isinstance(options, (list, tuple)):
        for value in options:
            yield from _values(value, secret=secret, depth=depth + 1)
    elif isinstance(options, bytes):
        yield from _values(options.decode("utf-8", "replace"), secret=secret, depth=depth)
    elif isinstance(options, str):
        if secret:
            yield options
        login = _login(options)
        if login:
            yield login.partition(":")[2] or login


def carries_credentials(url: str) -> bool:
    """Return whether a URL contains a login or a signed query. Also remembers the login as a secret."""
    if "://" not in url or url.partition("://")[0].lower() in _LOCAL:
        return False
    keep_secret({"url": url})
    rest = url.partition("://")[2]
    signed = any(_is_secret_name(name) for _, name, _ in _QUERY.findall(rest.partition("?")[2]))
    return bool(_login(url)) or signed


def without_known_secrets(text: str) -> str:
    """Replace known secrets, and the logins and query values of URLs, by "***".

    Known secrets are the values that `keep_secret` has remembered, and the values of environment variables whose names
    suggest a secret. Harmless query values, such as a region, stay. If the text is JSON, it stays valid JSON.
    """
    for value in sorted((*_known, *_of_environment()), key=len, reverse=True):
        for form in _forms(value):
            if form in text:
                whole = re.escape(form) if len(form) >= _LONG else rf"{_START}{re.escape(form)}(?!\w)"
                text = re.sub(whole, MASK, text)
    return _URL.sub(_clean_url, text) if ":/" in text else text


def without_secrets(text: str) -> str:
    """Replace secrets by "***": those of `without_known_secrets`, bearer tokens, and values as in "api_key=..."."""
    text = without_known_secrets(text)
    if "=" in text or ":" in text:
        text = _QUOTED.sub(rf"\1{MASK}", _ASSIGNED.sub(rf"\1{MASK}", text))
    if "earer" in text or "asic" in text or "uthorization" in text:
        text = _BEARER.sub(rf"\1{MASK}", text)
    return text


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that names in a checkpoint cannot control the terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text) if _CONTROL.search(text) else text


def _forms(value: str) -> set[str]:
    """Return the spellings that a text may use for the value: plain or escaped as in `repr`, each also URL-encoded."""
    plain = {value, value.encode("unicode_escape").decode("ascii")}
    return plain | {quote(form, safe=safe) for form in plain for safe in ("", "/")}


def _of_environment() -> list[str]:
    return [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_VARIABLE and _SECRET_VARIABLE.search(name) and value.lower() not in _NO_SECRETS
    ]


def _login(url: str) -> str:
    """Return the login in a URL, or "" if the URL has no login.

    The login ends at the last "@", because a password may contain "/" and "@".
    """
    scheme, separator, rest = url.partition("://")
    at = rest.rfind("@")
    if not separator or at < 0:
        return ""
    head = rest[:at]
    if ":" in head.partition("/")[0]:  # after a "/", a ":" is part of a name: runs/2026-01-31T12:00/step@1
        return "" if scheme.lower() in _LOCAL or head.startswith("arn:") else head
    return "" if "/" in head or scheme.lower() in _PLACE_BEFORE_AT else head


def _is_secret_name(name: str) -> bool:
    return name.lower().removeprefix("amp;") in ("sig", "sas", "token") or bool(re.search(rf"(?i){_NAMES}", name))


def _clean_url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    if scheme.partition(":")[0].lower() in _LOCAL:
        return match[0]
    login = _login(f"{scheme.partition(':')[0]}://{rest}")
    if login:
        rest = f"{MASK}{rest[len(login) :]}"
    path, mark, query = rest.partition("?")
    if not mark:
        return scheme + rest
    return f"{scheme}{path}?{_QUERY.sub(_clean_parameter, query)}"


def _clean_parameter(match: re.Match[str]) -> str:
    separator, name, value = match.groups()
    shown = value if name.lower().removeprefix("amp;") in _PLAIN_QUERY else MASK
    return f"{separator}{name}={shown}"

"""Finds credentials in text, refuses them in recipes, and masks them in printed and stored text.

A recipe is copied into manifests, run.json, job definitions, trackers and reports, which more people read than may use
a password. So an address in it has no user, no password, and no parameter that could be a secret. Libraries find
credentials in their own places: `.netrc`, the token of the Hugging Face hub, AWS's credential chain.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

MASK = "***"
WHERE_THEY_BELONG = (
    "A recipe is stored with everything made from it, and shown. Credentials belong where libraries look for them: for "
    "a web server in ~/.netrc (or the file in NETRC), for the Hugging Face hub in HF_TOKEN or `hf auth login`, for S3 "
    "in AWS's chain (AWS_PROFILE, ~/.aws/credentials, a role). Download a file with a signed address first."
)

# Parameters of web addresses that select a file or a version, and grant nothing. All others are masked, because a
# signed address is a password, whatever the names of its parameters.
_HARMLESS = frozenset(
    {"version", "versionid", "generation", "revision", "ref", "rev", "branch", "config", "split", "subset"}
)
# These parameters are harmless with short values: switches, numbers and codes.
_HARMLESS_IF_SHORT = frozenset(
    {"download", "dl", "raw", "format", "export", "lang", "language"}
    | {"page", "offset", "limit", "length", "start", "end"}
)
_SHORT = re.compile(r"[0-9]*|[\w-]{0,8}")
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "pass", "pwd", "pw", "credential", "credentials"}
    | {
        "signature",
        "sig",
        "key",
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "jwt",
        "session",
        "sas",
        "cookie",
        "login",
        "policy",
        "webhook",
    }
)
_SECRET_PARTS = ("token", "secret", "passw", "credential", "signature", "apikey", "accesskey", "jwt")
_NO_SECRET_PARTS = ("tokenizer", "tokens")

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):(/+)([^\s\"'<>`]*)")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_PARAMETER = re.compile(r"([?&;#])([^?&;#]*)")
_PARAMETER_OF_PATH = re.compile(r"(?<=[/,])([^/,=?&;#]{1,64})=([^/,?&;#]+)")
_PORT = re.compile(r"[0-9]{0,5}[.,;:!)\]}]*")  # with the end of a sentence
# The text before an "@", back to a space, a quote, a slash or another "@". It is tried only where it begins, so that
# the time grows linearly with the text. An image's name with tag and digest does not match.
_BEFORE_AT = re.compile(r"(?<![^\s/@\"'])[^\s/@\"']++@(?!sha256:)(?=[^\s@/])")
# user:password without a scheme in that text, at the begin of a word.
_USER_AND_PASSWORD = re.compile(r"(?:\A|(?<=[=,(\[]))(?!mailto:)[^:=,(\[]+:(?=.)", re.DOTALL)
# //user:password@host, an address without a scheme.
_OF_ANY_SCHEME = re.compile(r"(?<![\w:/*])//[^\s/@\"']+@(?=[^\s@/])")
# Tokens with a known prefix or form, as scanners of repositories recognise them.
_TOKENS = re.compile(
    "|".join(
        (
            r"\bhf_[A-Za-z0-9]{30,}",  # Hugging Face
            r"\bgh[opsur]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}",
            r"\bgl(?:pat|dt|rt|cbt|ptt|soat)-[\w-]{20,}",  # GitLab
            r"\bxox[abeprs]-[\w-]{10,}|\bxapp-[\w-]{20,}|(?<=hooks\.slack\.com/services/)[\w/]{20,}",
            r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",  # AWS
            r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bGOCSPX-[\w-]{20,}",  # Google
            r"\bsk-(?:ant|proj|svcacct|or)-[\w-]{16,}|\bsk-[A-Za-z0-9]{32,}|\b[rs]k_(?:live|test)_\w{16,}",
            r"\bdckr_(?:pat|oat)_[\w-]{20,}|\bnpm_[A-Za-z0-9]{36}|\bpypi-[\w-]{50,}",  # registries of packages
            r"\bnvapi-[\w-]{40,}|\bglsa_\w{30,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bhvs\.[\w-]{24,}",
            r"\bAGE-SECRET-KEY-1[0-9A-Z]{50,}",
            r"\beyJ[\w-]{10,1000}\.[\w-]{10,}\.[\w-]+",  # JSON Web Tokens; without a limit, "eyJ-eyJ-" takes minutes
            r"(?s:(?<=-----BEGIN )([A-Z ]*)PRIVATE KEY-----.*?(?:-----END \1PRIVATE KEY-----|\Z))",
        )
    )
)
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:(?:basic|bearer|token)\s+)?+|bearer\s+)[^\s'\",;]{6,}"
)
# A name that ends in "key" is a secret's unless the word before says otherwise; DBPASS is one word.
_SECRET_VARIABLE = re.compile(
    r"(?i)(?:access|api|private|secret)_?key|(?:^|_)pat(?:_|$)|(?<![a-z])(?!bypass|compass)[a-z]+pass$"
    r"|(?<!cache)(?<!hash)(?<!public)(?<!sort)(?<!map)_key$"
)
# Words that in variables' names more often mean a compiler's pass, a cache's key or a policy.
_NOT_OF_VARIABLES = ("pass", "key", "policy", "session", "sig", "signature", "login")
# An "@" in the first part of these addresses begins a revision, unless a kind of repository follows.
_SCHEMES_WITH_REVISIONS = ("hf", "datasets")
_REPOSITORY_KINDS = ("datasets", "spaces", "models", "buckets")
_WEB = ("http", "https")
_MAX_DEPTH = 3
"""Depth to which addresses in the paths of addresses are searched."""


def mask(text: str) -> str:
    """Return `text` with possible credentials masked: users and passwords of addresses, parameters of web addresses
    that are not known to be harmless, and tokens of a known form. A masked text stays the same.
    """
    return _mask(text, keeps_unknown_parameters=False)


def require_no_credentials(value: str, what: str) -> None:
    """Raise `ValueError`, whose message shows nothing of `value`, where `mask` would change it."""
    if mask(value) != value:
        raise ValueError(
            f"{what} holds a user, a password, a token, or a parameter of an address that may be a secret. "
            f"{WHERE_THEY_BELONG}"
        )


def holds_secret(text: str) -> bool:
    """Tell whether `text` certainly holds a credential. Unlike `mask`, it ignores parameters with unknown names, and
    text that may be a mail address behind a label.
    """
    return _mask(text, keeps_unknown_parameters=True) != text


def mask_values(value: Any) -> Any:
    """Return the same tables and lists with every text masked, ready to be written as JSON."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {mask_values(name): mask_values(each) for name, each in value.items()}
    return [mask_values(each) for each in value] if isinstance(value, (list, tuple)) else value


def is_secret(variable: str, value: str) -> bool:
    """Tell whether an environment variable may be a secret, by its name or its value, and must not be stored."""
    return (
        bool(_SECRET_VARIABLE.search(variable)) or _names_secret(variable, *_NOT_OF_VARIABLES) or mask(value) != value
    )


def _mask(text: str, *, keeps_unknown_parameters: bool) -> str:
    text = _mask_addresses(text, keeps_unknown_parameters, depth=0)
    if not keeps_unknown_parameters:
        text = _BEFORE_AT.sub(_mask_user_and_password, text)
    text = _OF_ANY_SCHEME.sub(f"//{MASK}@", text)
    text = _HEADER.sub(lambda match: match[1] + MASK, text)
    return _TOKENS.sub(MASK, text)


def _mask_user_and_password(match: re.Match[str]) -> str:
    before = match[0].removesuffix("@")
    is_begin_of_word = match.start() == 0 or match.string[match.start() - 1] not in "/@"
    for found in _USER_AND_PASSWORD.finditer(before):
        if found.start() or is_begin_of_word:
            return f"{before[: found.start()]}{MASK}@"
    return match[0]


def _mask_addresses(text: str, keeps_unknown_parameters: bool, depth: int) -> str:
    return _ADDRESS.sub(lambda match: _mask_address(match, keeps_unknown_parameters, depth), text)


def _mask_address(match: re.Match[str], keeps_unknown_parameters: bool, depth: int) -> str:
    scheme, slashes, rest = match.groups()
    end = min((rest.find(each) for each in "/?#" if each in rest), default=len(rest))
    place, path = _mask_place(scheme.lower(), rest[:end], rest[end:])
    begin = min((path.find(each) for each in "?#;&" if each in path), default=len(path))
    folders = _PARAMETER_OF_PATH.sub(
        lambda each: f"{each[1]}={MASK}" if _names_secret(each[1], "key") else each[0], path[:begin]
    )
    if depth < _MAX_DEPTH:
        folders = _mask_addresses(folders, keeps_unknown_parameters, depth + 1)
    elif ":/" in folders:
        folders = f"/{MASK}"
    is_strict = scheme.lower() in _WEB and not keeps_unknown_parameters
    parameters = _PARAMETER.sub(lambda each: each[1] + _mask_parameter(each[2], is_strict), path[begin:])
    return f"{scheme}:{slashes}{place}{folders}{parameters}"


def _mask_place(scheme: str, place: str, path: str) -> tuple[str, str]:
    """Return host and path with user and password masked, even where these have unescaped special characters."""
    decoded = unquote(place)
    host = decoded.rpartition("]")[2] if decoded.startswith("[") else decoded
    has_port = ":" in host and not host.startswith("arn:")
    has_revision = scheme in _SCHEMES_WITH_REVISIONS and decoded.rpartition("@")[2] not in _REPOSITORY_KINDS
    if "@" in decoded and (":" in decoded or not has_revision):
        _, at, host = place.rpartition("@")
        return (f"{MASK}@{host}" if at else MASK), path
    if has_port and "@" in path:  # a password with a slash
        return MASK, "@" + path.rpartition("@")[2]
    if has_port and not _PORT.fullmatch(host.rpartition(":")[2]):
        return f"{place.partition(':')[0]}:{MASK}" if ":" in place else MASK, path
    return place, path


def _mask_parameter(parameter: str, is_strict: bool) -> str:
    name, equals, value = parameter.partition("=")
    if is_strict and parameter not in ("", MASK) and not _is_harmless(unquote(name).strip().lower(), value):
        return f"{name}={MASK}" if equals else MASK
    return f"{name}={MASK}" if value and _names_secret(unquote(name)) else parameter


def _is_harmless(name: str, value: str) -> bool:
    return name in _HARMLESS or (name in _HARMLESS_IF_SHORT and bool(_SHORT.fullmatch(value)))


def _names_secret(name: str, *but: str) -> bool:
    """Tell whether a name says that its value is a secret; words in `but` are ignored."""
    words = {word.lower() for word in _WORD.findall(name)}
    joined = re.sub(r"[^a-z]", "", name.lower())
    for harmless in _NO_SECRET_PARTS:
        joined = joined.replace(harmless, "")
    return bool(words & (_SECRET_WORDS - set(but))) or any(part in joined for part in _SECRET_PARTS)

"""What a store that refuses means by it, and what to do about that, in words."""

from __future__ import annotations

from typing import Any

__all__ = ["advice_on"]

_S3 = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), storage_options={...}"
_GCS = "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, storage_options={...}"
_CREDENTIALS = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS}
_EXPIRED = frozenset(["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"])
_UNKNOWN = frozenset(["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "401"])
_CLOCK = frozenset(["RequestTimeTooSkewed", "RequestInTheFuture"])
_ELSEWHERE = frozenset(
    [
        "PermanentRedirect",
        "TemporaryRedirect",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "301",
        "302",
        "307",
        "308",
    ]
)


def advice_on(error: BaseException, protocol: str) -> str:
    """Return a sentence on an error of a store, to be appended to its own words; "" where there is nothing to add."""
    answer = _answer(error)
    code = str(answer.get("Error", {}).get("Code", "") or getattr(error.__cause__, "code", ""))
    given = f"{_CREDENTIALS.get(protocol, 'storage_options={...}')}, or --storage-option NAME=VALUE"
    said = f" ({code})" if code else ""
    if code in _EXPIRED:
        return f"{said}. The token has expired. Give a new one by {given}"
    if code in _CLOCK:
        return f"{said}. The clock of this machine is not the store's: set it right"
    if code in _UNKNOWN or "Credential" in type(error).__name__:
        return f"{said}. Give credentials that the store knows by {given}"
    if code in _ELSEWHERE or isinstance(error, RecursionError):
        return said + _elsewhere(answer)
    if isinstance(error, PermissionError):
        what = getattr(error.__cause__, "operation_name", "") or "This"
        return (
            f"{said}. {what} is not allowed here. Give credentials that may list, read, write and delete below this "
            f"URL by {given}"
        )
    if code == "400":  # what answers HEAD has no body
        return ". The store gives no reason; an expired token, or a bucket in another region, look like this"
    return ""


def _elsewhere(answer: Any) -> str:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = answer.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region") or ""
    there, which = region or "...", f", {region}" if region else ""
    return (
        f". The bucket is in another region{which}, or at another endpoint. Set AWS_DEFAULT_REGION={there}, or "
        f'client_kwargs={{"region_name": "{there}"}} in storage_options; for an endpoint AWS_ENDPOINT_URL, or '
        "--storage-option endpoint_url=..."
    )


def _answer(error: BaseException) -> Any:
    for candidate in (error.__cause__, error):
        found = getattr(candidate, "response", None)
        if isinstance(found, dict):
            return found
    return {}

"""What a signature says of a body, found beside the thread that all connections share."""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Any
from urllib.parse import urlsplit

from ckptkit.storage.content import Body, Content

__all__ = ["sign_beside", "signed_as"]

_NAME = "ckptkit-s3v4"  # of our own: other clients of botocore in this process sign as before
_UNSIGNED = "UNSIGNED-PAYLOAD"


def sign_beside(client: Any) -> None:
    """Let `client` take what a signature says of a `Body` from that, where it is known.

    botocore takes the SHA-256 itself as it signs: in the event loop, where no other request is sent or answered
    meanwhile.
    """
    import botocore.auth  # type: ignore[import-untyped]

    if _NAME not in botocore.auth.AUTH_TYPE_MAPS:
        botocore.auth.AUTH_TYPE_MAPS[_NAME] = _signer(botocore.auth.S3SigV4Auth)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"choose-signer.s3.{operation}", _choose)


def signed_as(client: Any, content: Content, *, checked: bool) -> str | None:
    """Return what the signature of a put says of its body; None: let botocore see to it.

    Over plain HTTP it is the SHA-256, so that nobody on the way can change the bytes. Over TLS nobody can, and botocore
    leaves it out where a checksum goes with the body (`checked`). So do we on the way to this very machine, where
    nobody is: `config_kwargs={"s3": {"payload_signing_enabled": True}}` signs it there, too.
    """
    asked = (getattr(client.meta.config, "s3", None) or {}).get("payload_signing_enabled")
    place = urlsplit(str(client.meta.endpoint_url))
    if asked is False or (asked is None and place.scheme == "https"):
        return None
    if asked is None and checked and _is_here(place.hostname or ""):
        return _UNSIGNED
    digest = hashlib.sha256()
    for piece in content.pieces:
        digest.update(piece)
    return digest.hexdigest()


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _choose(signature_version: Any, signing_name: Any, context: Any, **_: Any) -> str | None:
    usual = signature_version in ("v4", "s3v4") and signing_name == "s3" and context.get("auth_type") in (None, "v4")
    return _NAME if usual and not context.get("unsigned_payload") else None


def _signer(base: Any) -> Any:
    class Signer(base):  # type: ignore[misc]
        def payload(self, request: Any) -> str:
            known = request.body.signed_as if isinstance(request.body, Body) else None
            if known is None or self._is_streaming_checksum_payload(request):
                return str(super().payload(request))
            return known

    return Signer

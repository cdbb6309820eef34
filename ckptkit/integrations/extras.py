"""Creates the error for an integration whose framework is not installed."""

from __future__ import annotations

from ckptkit.errors import MissingExtraError


def missing(package: str, extra: str) -> MissingExtraError:
    """Return an error that names the package and the extra that installs it."""
    return MissingExtraError(
        f"this needs {package}, which is not installed. Install it from the checkout with: pip install -e '.[{extra}]'"
    )

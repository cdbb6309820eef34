"""Prints the lowest version that pyproject.toml declares of each dependency, as constraints of pip.

For `make test-floor`.
"""

from __future__ import annotations

import re
from pathlib import Path

# What s3fs and moto ask for themselves, and what pip would look for among hundreds of versions.
SHARED = {"aiobotocore": "2.26.0", "boto3": "1.41.5", "botocore": "1.41.5"}


def floors(text: str) -> dict[str, str]:
    """Return the lowest declared version of each package that `pip install '.[test]'` asks for."""
    asked = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    return dict(re.findall(r'"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)', asked))


if __name__ == "__main__":
    declared = floors(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8"))
    for name, version in {**declared, **SHARED}.items():
        print(f"{name}=={version}")

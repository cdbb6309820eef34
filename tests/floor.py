"""Print the lowest version of each dependency that pyproject.toml declares, as pip constraints.

For `make test-floor`.
"""

import re
from pathlib import Path

# Requirements of s3fs and moto, and packages for which pip would otherwise search hundreds of versions.
SHARED = {"aiobotocore": "2.26.0", "boto3": "1.41.5", "botocore": "1.41.5"}


def floors(text: str) -> dict[str, str]:
    """Return the lowest declared version of each package that `pip install '.[test]'` asks for."""
    asked = text[text.index("\ndependencies = [") : text.index("\ndev = [")]
    return dict(re.findall(r'"([\w.-]+)(?:\[[\w,]+\])?>=([\d.]+)', asked))


if __name__ == "__main__":
    declared = floors(Path(__file__).parent.parent.joinpath("pyproject.toml").read_text(encoding="utf-8"))
    for name, version in {**declared, **SHARED}.items():
        print(f"{name}=={version}")

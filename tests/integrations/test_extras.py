"""Without any framework installed, each integration and protocol names the extra that provides it."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, json, sys

sys.modules.update(dict.fromkeys((  # imports of these fail
    "lightning", "lightning_fabric", "pytorch_lightning", "transformers", "accelerate", "torchtitan", "torchdata",
    "s3fs", "gcsfs", "adlfs",
)))

def told(call):
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return []

from ckptkit.storage import open_store

found = {name: told(lambda: importlib.import_module(f"ckptkit.integrations.{name}"))
         for name in ("lightning", "transformers", "accelerate", "torchtitan", "hub")}
found |= {url: told(lambda: open_store(url).list()) for url in ("s3://bucket/run", "gs://bucket/run", "abfs://box/run")}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("place", "package", "extra"), [
    ("lightning", "lightning", "lightning"), ("transformers", "transformers", "hf"), ("accelerate", "accelerate", "hf"),
    ("s3://bucket/run", "s3", "s3"), ("gs://bucket/run", "gs", "gcs"), ("abfs://box/run", "abfs", "azure"),
])  # fmt: skip
def test_an_error_names_a_missing_package_and_the_extra_that_installs_it(told, place, package, extra):
    kind, message = told[place]
    assert kind == "MissingExtraError"
    assert package in message
    assert f"-e '.[{extra}]'" in message and "install ckptkit" not in message


@pytest.mark.parametrize("name", ["torchtitan", "hub"])
def test_modules_without_a_framework_import_without_one(told, name):
    assert told[name] == []

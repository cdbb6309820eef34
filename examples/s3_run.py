"""A run on S3: save, rotate, load.

Starts a local server (moto, from the extra `test`) unless AWS_ENDPOINT_URL names a server. With your own server, set
RUN_URL to the URL of the run, in a bucket that exists. A second start then continues the run.

python examples/s3_run.py      # needs: pip install -e '.[s3]', and '.[test]' for the server
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import torch

from ckptkit import CheckpointManager, RetentionPolicy, TrainState


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Run an S3 server during the `with` block, unless AWS_ENDPOINT_URL names a server."""
    if "AWS_ENDPOINT_URL" in os.environ:
        yield
        return
    try:
        import s3fs
        from moto.server import ThreadedMotoServer
    except ImportError:
        raise SystemExit("Name a server in AWS_ENDPOINT_URL, or install one: pip install -e '.[s3,test]'") from None

    os.environ.update(
        AWS_ACCESS_KEY_ID="loopback-key", AWS_SECRET_ACCESS_KEY="loopback-secret", AWS_DEFAULT_REGION="us-east-1"
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    try:
        host, port = started.get_host_and_port()
        os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
        s3fs.S3FileSystem().mkdir("example")
        yield
    finally:
        started.stop()


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    url = os.environ.get("RUN_URL", "s3://example/run")
    with server(), CheckpointManager(url, retention=RetentionPolicy(max_num=2)) as manager:
        manager.load(state)
        for step in range(state.step + 1, state.step + 5):
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save_async(step, state)
        manager.wait()
        print("kept:", [record.name for record in manager.list()])
        report = manager.load(state)
        assert report is not None
        print(report.line())


if __name__ == "__main__":
    main()

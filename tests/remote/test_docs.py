"""The code blocks of docs/remote.md run, in their order, against a server."""

import shlex

from tests.docs.pages import BLOCK, text_of
from tests.remote.runs import Place, run_cli, state_of
from tests.storage import servers


def test_the_code_blocks_of_the_page_run(s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {**servers.CREDENTIALS, "AWS_ENDPOINT_URL": s3["endpoint_url"]}.items():
        monkeypatch.setenv(name, value)
    Place("s3://bucket/run").save(100, 200, 300)
    ran = 0
    for kind, block in BLOCK.findall(text_of("docs/remote.md").replace("http://127.0.0.1:9000", s3["endpoint_url"])):
        if kind == "console":
            for line in block.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                code, text = run_cli(*words[1:])
                assert words[0] == "ckptkit" and code == 0, f"{line}\n{text}"
                ran += 1
        elif block.startswith("from "):
            exec(compile(block, "remote.md", "exec"), {"state": state_of(3), "step": 400})
            ran += 1
    assert ran >= 6

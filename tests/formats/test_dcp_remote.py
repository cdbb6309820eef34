"""`dcp.save` and `dcp.load` with a real S3 server."""

import pytest
import torch

from ckptkit import DCPReader, DCPWriter
from ckptkit.errors import CheckpointExistsError
from ckptkit.storage import open_store
from tests.formats.dcp_states import assert_loads, failure, save, state
from tests.storage import servers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_state_round_trips_through_an_object_store_and_is_not_overwritten():
    made = state("plain@1")
    made["model"]["larger"] = torch.randn(5 << 20)
    with servers.moto() as options:
        open_store("s3://dcp-files", storage_options=options).fs.mkdir("dcp-files")
        save(DCPWriter("s3://dcp-files/dcp", storage_options=options), made)
        assert_loads(DCPReader("s3://dcp-files/dcp", storage_options=options), made)
        error = failure(save, DCPWriter("s3://dcp-files/dcp", storage_options=options), made)
        assert isinstance(error, CheckpointExistsError)

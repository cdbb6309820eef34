"""Lightning's strategies replace and remove only checkpoints on a disk, and no foreign files in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.integrations import lightning_state


@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_appears_during_a_removal_is_kept(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, set_aside = tmp_path / "last.ckpt", lightning_state._set_aside

    def theirs(path: Path) -> Path:
        if late:
            (place / "notes.txt").write_bytes(b"mine")
        return set_aside(path)

    place.mkdir()
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        (place / name).write_bytes(b"x")
    monkeypatch.setattr(lightning_state, "_set_aside", theirs)
    lightning_state.remove_checkpoint(place)
    kept: list[Any] = [path for path in tmp_path.rglob("*") if path.name == "notes.txt"]
    assert not place.exists() and len(kept) == late == ("contains notes.txt" in caplog.text)
    if not late:
        assert list(tmp_path.iterdir()) == []
        return
    assert kept[0].parent.name.startswith("last.ckpt.replaced-") and (kept[0].parent / ".metadata").exists()


def test_a_failed_removal_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    lightning_state.remove_checkpoint("nosuch://bucket/run/step=1.ckpt")
    assert "nosuch://bucket/run/step=1.ckpt was not removed" in caplog.text


def test_managed_checkpoint_needs_a_monitor_or_a_policy_to_keep_several() -> None:
    pytest.importorskip("lightning")  # here, because it takes seconds
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from ckptkit.integrations.lightning_callback import ManagedCheckpoint

    with pytest.raises(MisconfigurationException, match="save_top_k"):
        ManagedCheckpoint(save_top_k=3)
    assert ManagedCheckpoint(save_top_k=1).retention == RetentionPolicy(max_num=1)
    assert ManagedCheckpoint(retention=RetentionPolicy(max_num=3)).retention == RetentionPolicy(max_num=3)
    best = ManagedCheckpoint(save_top_k=3, monitor="loss").retention
    assert best == RetentionPolicy(max_num=1, keep_best=("loss", "min", 3))

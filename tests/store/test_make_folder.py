from __future__ import annotations

import pytest

from chatmill.store import files


def test_a_folder_that_another_process_creates_at_the_same_time_is_used(tmp_path, monkeypatch):
    class Racing(files.Disk):
        def make_folder(self, path):
            path.mkdir()
            super().make_folder(path)

    monkeypatch.setattr(files, "disk", Racing())
    files.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "a")

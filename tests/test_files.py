import pytest

from recml_sasrec import files


def test_an_unfinished_folder_is_removed_however_the_block_ends(tmp_path):
    for index, error in enumerate((None, KeyboardInterrupt)):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "part").write_text("x")
        if error is None:
            with files.unfinished(str(folder)):
                assert folder.exists()
        else:
            with pytest.raises(error), files.unfinished(str(folder)):
                raise error
        assert not folder.exists()


def test_a_process_that_ends_at_once_can_remove_them_before(tmp_path):
    with files.unfinished(str(tmp_path / "work")):
        (tmp_path / "work").mkdir()
        files.remove_unfinished()
        assert not (tmp_path / "work").exists()

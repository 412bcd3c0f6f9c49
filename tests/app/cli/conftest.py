"""The two tiny models that the tests of the command line share."""

import pytest

from tests.command_line import make_models, table


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "new.csv").write_text(table(40, seed=1))
    (folder / "sub.csv").mkdir()
    (folder / "no_target.csv").write_text("size,city,new\n1,Oslo,true\n")
    (folder / "one.csv").write_text(table(1))
    (folder / "empty_target.csv").write_text("size,city,new,price\n1,Oslo,true,\n")
    (folder / "text_target.csv").write_text("size,city,new,price\n1,Oslo,true,dear\n")
    (folder / "new_class.csv").write_text("size,city,new,kind\n1,Oslo,true,odd\n")
    return folder

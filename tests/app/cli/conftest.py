"""Tables beside the models, right and wrong, that the tests of the command line share."""

import pytest

from tests.command_line import table


@pytest.fixture(scope="module")
def models(models):
    (models / "new.csv").write_text(table(40, seed=1))
    (models / "sub.csv").mkdir()
    (models / "no_target.csv").write_text("size,city,new\n1,Oslo,true\n")
    (models / "one.csv").write_text(table(1))
    (models / "empty_target.csv").write_text("size,city,new,price\n1,Oslo,true,\n")
    (models / "text_target.csv").write_text("size,city,new,price\n1,Oslo,true,dear\n")
    (models / "new_class.csv").write_text("size,city,new,kind\n1,Oslo,true,odd\n")
    return models

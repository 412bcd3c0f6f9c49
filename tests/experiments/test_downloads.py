"""Data files: verified, cached, and looked for in the named folder first."""

import gzip
import hashlib
import io
import urllib.error

import pytest

from experiments.downloads import cache_folder, verified_contents

CONTENTS = b"1.0 2.0 3.0\n4.0 5.0 6.0\n"
FILE = ("sets/tiny.txt.gz", "https://example.org/tiny.txt", hashlib.sha256(CONTENTS).hexdigest())


@pytest.fixture
def named_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DROPBAYES_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "sets").mkdir(parents=True)
    return tmp_path / "data"


@pytest.fixture
def server(named_folder, monkeypatch):
    answers = []
    monkeypatch.setattr("urllib.request.urlopen", lambda address, timeout: io.BytesIO(answers.pop()))
    return answers


@pytest.mark.parametrize("encode", [bytes, gzip.compress])
def test_a_file_is_downloaded_once_compressed_or_not(server, encode):
    server.append(encode(CONTENTS))
    assert [verified_contents(*FILE) for _ in range(3)] == [CONTENTS] * 3


def test_the_named_folder_comes_before_the_network(named_folder, server):
    (named_folder / FILE[0]).write_bytes(gzip.compress(CONTENTS))
    assert verified_contents(*FILE) == CONTENTS and not cache_folder().exists()


def test_a_download_with_another_digest_is_refused_and_not_kept(server):
    server.append(CONTENTS + b"7 8 9\n")
    with pytest.raises(ValueError, match="SHA-256"):
        verified_contents(*FILE)
    assert not cache_folder().exists()


def test_a_damaged_file_is_refused(named_folder):
    (named_folder / FILE[0]).write_bytes(gzip.compress(CONTENTS[:-2]))
    with pytest.raises(ValueError, match="Delete the file"):
        verified_contents(*FILE)


def test_without_a_network_the_error_says_where_the_file_may_be_put(named_folder, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(FileNotFoundError, match=r"(?s)example\.org/tiny\.txt.*DROPBAYES_DATA"):
        verified_contents(*FILE)

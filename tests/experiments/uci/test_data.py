"""Tests of the UCI sets and their splits."""

import hashlib
import io

import numpy as np
import pytest

from experiments.uci import data as uci_data

# SHA-256 (first half) of the published index files of each set, all splits in order, as little-endian uint16.
SHIPPED_SPLITS = {
    "boston": "845498d6ef71675cf3d39a0d4f6f5f6c",
    "concrete": "8cea7ca9aef22ca6e9d5373fb62447d8",
    "energy": "e60ee3afd95a6e854bfb7a7fff2a1def",
    "kin8nm": "5c84fb843b9b96968cee46fbcb17ab4e",
    "naval": "b340ba977ae3f8f2aefe4d4c4280c24f",
    "power": "3e6a884791e6a624f745aa6f2e4b60e8",
    "protein": "2f540e4342ac840522c5b36f54504c81",
    "wine": "92876a4db5a01ffa9a7f93b788394c10",
    "yacht": "27947261dc776ebf5d723b388f8ded6a",
}


@pytest.mark.parametrize("name", uci_data.SETS)
def test_splits_from_the_seed_are_the_shipped_ones(name):
    source = uci_data.SETS[name]
    splits = uci_data.train_test_splits(source.n_rows, source.n_splits)
    orders = np.stack([np.concatenate(parts) for parts in splits]).astype("<u2")
    assert hashlib.sha256(orders.tobytes()).hexdigest()[:32] == SHIPPED_SPLITS[name]
    assert all(len(train) == round(0.9 * source.n_rows) for train, _ in splits)


@pytest.mark.parametrize("name", uci_data.SETS)
def test_named_folder_holds_the_published_data_and_splits(name, data_folder):
    folder, source = uci_data.data_folder(), uci_data.SETS[name]
    data = uci_data.load(name)
    assert data.x.shape == (source.n_rows, source.n_features)
    shipped = np.load(folder / f"{source.name}.splits.npz")
    for order, (train, test) in zip(shipped["perm"], data.splits, strict=True):
        assert len(train) == shipped["n_train"]
        assert np.array_equal(order, np.concatenate([train, test]))


@pytest.fixture
def tiny_source(monkeypatch, tmp_path):
    content = b"1.0 2.0 3.0\n4.0 5.0 6.0\n"
    source = uci_data.Source("tiny", 2, 2, 2, hashlib.sha256(content).hexdigest(), n_splits=1)
    monkeypatch.setitem(uci_data.SETS, "tiny", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DROPBAYES_DATA", raising=False)
    return content


def test_data_is_downloaded_once_checked_and_cached(tiny_source, monkeypatch):
    asked = []

    def answer(address, timeout):
        asked.append(address)
        return io.BytesIO(tiny_source)

    monkeypatch.setattr("urllib.request.urlopen", answer)
    for _ in range(2):
        assert uci_data.load("tiny").y.tolist() == [3.0, 6.0]
    assert len(asked) == 1
    assert "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/tiny/data/data.txt" in asked[0]


def test_csv_columns_other_than_the_target_are_inputs(tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("a,y,b\n" + "".join(f"{i},{10 * i},{-i}\n" for i in range(25)))
    data = uci_data.from_csv(path, target="y", n_splits=3)
    assert data.name == "my" and len(data.splits) == 3
    assert data.x[7].tolist() == [7.0, -7.0] and data.y[7] == 70.0


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("a,y\n" + "1,2\n" * 30, "z", "`target` must be a column"),
        ("a,y\n" + "1,x\n" * 30, "y", "Encode or drop text columns"),
        ("a,y\n" + "1,2\n" * 5, "y", "at least 20 rows"),
        ("a,y\n" + "nan,2\n" * 30, "y", "must be finite"),
    ],
)
def test_unusable_csv_is_explained(tmp_path, text, target, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        uci_data.from_csv(path, target=target)


def test_a_gap_split_tests_the_middle_third_of_one_input(data_folder):
    data = uci_data.load("yacht", gap=True)
    assert len(data.splits) == data.x.shape[1]
    for column, (learned, tested) in enumerate(data.splits):
        assert sorted([*learned, *tested]) == list(range(len(data.y)))
        inside, outside = data.x[tested, column], data.x[learned, column]
        low, high = inside.min(), inside.max()
        assert not ((outside > low) & (outside < high)).any()


def test_without_the_file_of_gap_splits_its_place_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DROPBAYES_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"gap_splits\.npz"):
        uci_data.gap_splits("yacht")

"""Tests of model files: round trips, and what happens to damaged ones."""

import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import time

import numpy as np
import pytest
import torch

from dropbayes.runtime import __version__, storage

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"


def written(path: pathlib.Path, **changes) -> pathlib.Path:
    tensors = {"weight": torch.arange(12.0).view(3, 4), "mask": torch.tensor([True, False])}
    arguments = {"kind": "Toy", "settings": {"names": ["a", "β"], "rate": 0.1, "none": None}}
    storage.save(path, tensors, **(arguments | changes))
    return path


def test_a_file_gives_back_what_was_saved(tmp_path):
    file = storage.load(written(tmp_path / "m.safetensors"), kinds=["Toy"])
    assert torch.equal(file.tensors["weight"], torch.arange(12.0).view(3, 4))
    assert torch.equal(file.tensors["mask"], torch.tensor([True, False]))
    assert file.settings == {"names": ["a", "β"], "rate": 0.1, "none": None}
    assert file.versions == {"dropbayes": __version__, "torch": torch.__version__}


def test_every_safetensors_reader_can_open_it(tmp_path):
    from safetensors.numpy import load_file

    arrays = load_file(written(tmp_path / "m.safetensors"))
    assert np.array_equal(arrays["weight"], np.arange(12.0).reshape(3, 4))


def test_saving_is_atomic_and_leaves_no_other_file(tmp_path, monkeypatch):
    path = written(tmp_path / "m.safetensors")
    before = path.read_bytes()

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        written(path, settings={"other": 1})
    assert path.read_bytes() == before
    monkeypatch.undo()
    written(path, settings={"other": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_every_truncation_is_refused_with_one_exception_class(tmp_path):
    contents = written(tmp_path / "m.safetensors").read_bytes()
    for length in range(len(contents)):
        with pytest.raises(ValueError) as caught:
            storage.parse(contents[:length], kinds=["Toy"])
        assert type(caught.value) is ValueError
    with pytest.raises(ValueError):
        storage.parse(contents + b"\0", kinds=["Toy"])


@pytest.mark.slow
def test_twenty_thousand_bit_flips_are_refused_with_one_exception_class(tmp_path):
    contents = written(tmp_path / "m.safetensors").read_bytes()
    chance = random.Random(0)
    for _ in range(20_000):
        damaged = bytearray(contents)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        with pytest.raises(ValueError) as caught:
            storage.parse(bytes(damaged), kinds=["Toy"])
        assert type(caught.value) is ValueError


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    path = tmp_path / "trap.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="damaged, cut short or not a dropbayes"):
        storage.load(path, kinds=["Toy"])
    assert not (tmp_path / "executed").exists()


def test_a_deeply_nested_header_is_refused():
    header = b'{"__metadata__":' + b"[" * 100_000
    with pytest.raises(ValueError, match="damaged"):
        storage.parse(len(header).to_bytes(8, "little") + header, kinds=["Toy"])


def test_unknown_kinds_and_other_formats_are_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"holds a 'Toy'; expected one of \['Other'\]"):
        storage.load(path, kinds=["Other"])
    monkeypatch.setattr(storage, "FORMAT", 2)
    written(path)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has the format 2; this version reads 1"):
        storage.load(path, kinds=["Toy"])


@pytest.mark.parametrize("settings", [{"x": float("nan")}, {"x": object()}])
def test_settings_that_json_cannot_hold_are_refused(tmp_path, settings):
    with pytest.raises(ValueError, match="`settings` must hold finite JSON values"):
        written(tmp_path / "m.safetensors", settings=settings)


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")  # it was fitted with names
@pytest.mark.parametrize("kind", ["DropoutRegressor", "DropoutClassifier"])
def test_the_file_of_format_1_loads_and_predicts_as_on_the_day_it_was_made(kind):
    import dropbayes.estimators as estimators

    expected = json.loads((FIXTURES / f"{kind}_format_1.json").read_text())
    model = getattr(estimators, kind).load(FIXTURES / f"{kind}_format_1.safetensors")
    x = np.asarray(expected["x"])
    if kind == "DropoutRegressor":
        mean, std = model.predict(x, return_std=True)
        # Draws may be taken in another way one day; the weights may not change.
        np.testing.assert_allclose(mean, expected["mean"], atol=0.1)
        np.testing.assert_allclose(std, expected["std"], atol=0.1)
        assert list(model.feature_names_in_) == expected["feature_names"]
    else:
        np.testing.assert_allclose(model.predict_proba(x), expected["probabilities"], atol=0.1)
        assert model.predict(x).tolist() == expected["labels"]
    total = sum(float(w.double().sum()) for w in model.population_.weights)
    assert total == pytest.approx(expected["weight_sum"], rel=1e-12)


def signed(description, tensors=None, data=b""):
    """The bytes of a file with a right digest, which anyone can compute, and any contents."""
    outer = json.dumps({"model": json.dumps(description), "sha256": "0" * 64})
    header = json.dumps({"__metadata__": {"dropbayes": outer}, **(tensors or {})}).encode()
    contents = len(header).to_bytes(8, "little") + header + data
    digest = hashlib.sha256(contents).hexdigest().encode()
    start = contents.rindex(b"0" * 64)
    return contents[:start] + digest + contents[start + 64 :]


WHOLE = {"format": 1, "kind": "Toy", "settings": {}, "versions": {}}


@pytest.mark.parametrize(
    ("description", "tensors"),
    [
        (WHOLE | {"format": True}, {}),
        (WHOLE | {"format": [1]}, {}),
        (WHOLE | {"kind": ["Toy"]}, {}),
        (WHOLE | {"settings": []}, {}),
        ({"format": 1}, {}),
        ([], {}),
        (WHOLE, {"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
        (WHOLE, {"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}),
        (WHOLE, {"w": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}),
        (WHOLE, {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}),
        (WHOLE, {"w": 3}),
    ],
)
def test_signed_files_of_impossible_contents_raise_the_same_error(description, tensors):
    assert storage.parse(signed(WHOLE), kinds={"Toy"}).kind == "Toy"
    with pytest.raises(ValueError) as caught:
        storage.parse(signed(description, tensors, b"\0" * 4), kinds={"Toy"})
    assert type(caught.value) is ValueError


def test_a_tensor_is_checked_against_what_the_settings_say(tmp_path):
    file = storage.load(written(tmp_path / "m.safetensors"), kinds=["Toy"])
    assert file.tensor("weight", shape=(3, None)).shape == (3, 4)
    for name, shape in (("weight", (4, 3)), ("weight", (3,)), ("none", (1,)), ("mask", (2,))):
        with pytest.raises(ValueError, match="`path` must hold"):
            file.tensor(name, shape=shape)
    file.tensors["weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match="must hold finite numbers in 'weight'"):
        file.tensor("weight", shape=(3, 4))


def save_many(path):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: written(path), range(100)))


@pytest.mark.slow
def test_two_hundred_saves_from_two_processes_with_two_threads_are_all_whole(tmp_path):
    path = written(tmp_path / "m.safetensors")
    writers = [multiprocessing.get_context("spawn").Process(target=save_many, args=(path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        storage.load(path, kinds=["Toy"])
        time.sleep(0.001)  # leaves the core to the writers
    assert [writer.exitcode for writer in writers] == [0] * 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; name a file in it"):
        written(tmp_path)
    with pytest.raises(IsADirectoryError, match=r"dropbayes\.load reads the folder"):
        storage.load(tmp_path, kinds=["Toy"])
    assert not list(tmp_path.parent.glob("*.part"))

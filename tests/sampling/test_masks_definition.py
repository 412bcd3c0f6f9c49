"""`docs/masks.md` defines the masks: an implementation written from that page alone, the library's and the page's file
of values agree bit for bit. `python tests/sampling/test_masks_definition.py` writes the file anew."""

import json
import pathlib
from itertools import product

import numpy as np
import pytest
import torch

from dropbayes.sampling.masks import Keys, Units, keep_mask, named_site, uniform

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "masks.md"
VALUES = PAGE.with_suffix(".json")
CPU = torch.device("cpu")


# The page, line by line, on Python's integers ------------------------------------------------------------------------


def hash_word(key, n):
    z = (key + n * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def stream(seed, replicate, site, purpose):
    key = seed % 2**64
    for coordinate in (replicate, site, purpose):
        key = hash_word(key, coordinate + 1)
    return key


def half(key, row, unit, units):
    word = hash_word(key, row * ((units + 1) // 2) + unit // 2)
    return word >> 32 if unit % 2 else word % 2**32


def rank(permutation, n_draws):
    hashes = np.array([hash_word(0x6D61736B73, permutation * n_draws + j) for j in range(n_draws)], dtype=np.uint64)
    return np.argsort(hashes.view(np.int64)).tolist()


def word(seed, replicate, sampler, n_draws, site, draw, row, unit, units):
    if sampler == "independent":
        return half(hash_word(stream(seed, replicate, site, 3), draw), row or 0, unit, units) ^ 0x80000000
    key = stream(seed, replicate, site, 2)
    shift = shared_shift(seed, replicate, site, unit) if row is None else half(key, row, unit, units)
    return (point(seed, replicate, n_draws, site, draw, row, unit) + shift) % 2**32


def shared_shift(seed, replicate, site, unit):
    return hash_word(stream(seed, replicate, site, 1), unit) % 2**32


def point(seed, replicate, n_draws, site, draw, row, unit):
    choice = hash_word(stream(seed, replicate, site, 1), unit)
    permutation = (choice >> 32) % 2**16 % max(1, min(256, 2**20 // n_draws))
    start = (choice >> 48) % n_draws
    turn = 0 if row is None else hash_word(stream(seed, replicate, -1, 4), row) >> 32
    return rank(permutation, n_draws)[(start + draw + turn) % n_draws] * 2**32 // n_draws


def named(name):
    key = 0
    for byte in name.encode():
        key = hash_word(key, byte + 1)
    return key


def placed_word(seed, replicate, sampler, n_draws, site, draw, row, unit):
    """The word of a unit that is numbered by position."""
    if row is None:
        return word(seed, replicate, sampler, n_draws, site, draw, None, unit, 2)
    if sampler == "independent":
        key = hash_word(hash_word(stream(seed, replicate, site, 3), draw), row + 1)
        return half(key, 0, unit, 2) ^ 0x80000000
    shift = half(hash_word(stream(seed, replicate, site, 2), row + 1), 0, unit, 2)
    return (point(seed, replicate, n_draws, site, draw, row, unit) + shift) % 2**32


def threshold(drop_prob):
    return min(round(drop_prob * 2**32), 2**32 - 1)


# The file of values --------------------------------------------------------------------------------------------------

NAMES = ("layer dropout 0", "transformer.h.0.attn attention 0", "shared dropout 1 in décodeur")
DROP_PROBS = (0.0, 1e-9, 0.05, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1 - 2**-33, 1 - 3 * 2**-33, 5 * 2**-33, 1.0)


def cases():
    """Coordinates that meet every branch: both samplers, rows or none, odd and even units, one permutation or many."""
    for sampler, row, units in product(("stratified", "independent"), (None, 0, 5), (1, 4, 7)):
        yield {"seed": "3", "replicate": 0, "sampler": sampler, "n_draws": 10, "site": 0, "draw": 7, "row": row, "units": units}  # fmt: skip
    for sampler, seed, n_draws in product(("stratified", "independent"), (0, 2**53 + 1, 2**64 - 1), (1, 100)):
        yield {"seed": str(seed), "replicate": 0, "sampler": sampler, "n_draws": n_draws, "site": 2, "draw": n_draws - 1, "row": None, "units": 5}  # fmt: skip
    for sampler in ("stratified", "independent"):
        yield {"seed": "11", "replicate": 2, "sampler": sampler, "n_draws": 5000, "site": 3, "draw": 4321, "row": 1_000_000, "units": 3}  # fmt: skip


def placed_cases():
    """One axis of positions after the features, and two (query and key) after the heads."""
    for sampler, row in product(("stratified", "independent"), (None, 0, 5)):
        case = {"seed": "3", "replicate": 0, "sampler": sampler, "n_draws": 10, "site": named("layer dropout 0"), "draw": 7, "row": row}  # fmt: skip
        yield case | {"shape": [3, 2], "axes": [1], "starts": [4]}
        yield case | {"shape": [3, 1, 2], "axes": [1, 2], "starts": [5, 4]}


def placed_words_of(case):
    keyed = {name: case[name] for name in ("replicate", "sampler", "n_draws", "site", "draw", "row")}
    within = [n for axis, n in enumerate(case["shape"]) if axis not in case["axes"]]
    words = []
    for index in np.ndindex(*case["shape"]):
        place = 0
        for axis, start in zip(case["axes"], case["starts"], strict=True):
            place = place * 2**20 + index[axis] + start
        unit = np.ravel_multi_index([i for a, i in enumerate(index) if a not in case["axes"]], within)
        words.append(placed_word(int(case["seed"]), **keyed, unit=place * int(np.prod(within)) + int(unit)))
    return words


def words_of(case):
    coordinates = {name: value for name, value in case.items() if name != "units"} | {"seed": int(case["seed"])}
    return [word(**coordinates, unit=unit, units=case["units"]) for unit in range(case["units"])]


def mask_of(case, drop_prob):
    return "".join("01"[value >= threshold(drop_prob)] for value in words_of(case))


def values():
    """Everything in the file, from the implementation above."""
    keys = [(1234567, 1), (1234567, 2), (1234567, 3), (0, 0), (2**64 - 1, 2**32)]
    streams = [(0, 0, 0, 1), (3, 0, 1, 2), (2**64 - 1, 1, 4, 3)]
    masked = [case | {"units": 24} for case in cases() if case["units"] == 4]
    return {
        "hash": [{"key": hex(key), "n": n, "value": hex(hash_word(key, n))} for key, n in keys],
        "stream": [
            {"seed": str(s), "replicate": r, "site": i, "purpose": p, "value": hex(stream(s, r, i, p))}
            for s, r, i, p in streams
        ],
        "rank": [
            {"permutation": p, "n_draws": t, "value": rank(p, t)} for p, t in ((0, 1), (0, 5), (255, 10), (7, 16))
        ],
        "threshold": [{"drop_prob": p, "value": threshold(p)} for p in DROP_PROBS],
        "words": [case | {"value": words_of(case)} for case in cases()],
        "names": [{"name": name, "value": hex(named(name))} for name in NAMES],
        "positions": [case | {"site": hex(case["site"]), "value": placed_words_of(case)} for case in placed_cases()],
        "masks": [case | {"drop_prob": p, "value": mask_of(case, p)} for case in masked for p in (0.1, 0.5)],
    }


@pytest.fixture(scope="module")
def published():
    return json.loads(VALUES.read_text())


def test_the_published_values_are_those_of_the_page(published):
    assert published == values()


def test_the_hash_is_the_published_splitmix64():
    # The first outputs for the seed 1234567, as published with the generator's reference implementation.
    assert [hash_word(1234567, n) for n in (1, 2, 3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_library_gives_the_published_words(published):
    for case in published["words"]:
        keys, draws, rows = coordinates(case)
        uniforms = uniform(keys, case["site"], draws=draws, rows=rows, shape=(case["units"],), device=CPU)
        assert (uniforms.flatten() * 2**32 - 0.5).long().tolist() == case["value"]


def test_the_library_gives_names_the_published_numbers(published):
    for case in published["names"]:
        assert named_site(case["name"]) == int(case["value"], 16)


def test_the_library_gives_the_published_words_by_position(published):
    for case in published["positions"]:
        keys, draws, rows = coordinates(case)
        units = Units(tuple(case["shape"]), tuple(case["axes"]), tuple(case["starts"]))
        site = int(case["site"], 16)
        uniforms = uniform(keys, site, draws=draws, rows=rows, shape=units.shape, device=CPU, units=units)
        assert (uniforms.flatten() * 2**32 - 0.5).long().tolist() == case["value"]


def test_the_library_gives_the_published_masks(published):
    for case in published["masks"]:
        assert "".join(map(str, library_mask(case, case["drop_prob"]))) == case["value"]


@pytest.mark.parametrize("drop_prob", DROP_PROBS)
def test_the_library_rounds_the_drop_probability_as_the_page_does(drop_prob):
    case = {"seed": "5", "replicate": 0, "sampler": "independent", "n_draws": 1, "site": 0, "draw": 0, "row": None, "units": 64}  # fmt: skip
    assert library_mask(case, drop_prob) == [int(value >= threshold(drop_prob)) for value in words_of(case)]


def test_the_page_shows_published_values(published):
    text = PAGE.read_text()
    assert f"`{published['hash'][0]['value']}`" in text
    case = next(case for case in published["masks"] if case["row"] is None and case["sampler"] == "stratified")
    assert text.count(case["value"]) == 2  # in the table and printed by the example


def coordinates(case):
    keys = Keys(int(case["seed"]), case["n_draws"], case["sampler"], case["replicate"])
    row = case["row"]
    return keys, range(case["draw"], case["draw"] + 1), None if row is None else range(row, row + 1)


def library_mask(case, drop_prob):
    keys, draws, rows = coordinates(case)
    shape = (case["units"],)
    mask = keep_mask(
        keys, case["site"], drop_prob=drop_prob, draws=draws, rows=rows, shape=shape, dtype=torch.float64, device=CPU
    )
    return mask.flatten().int().tolist()


def as_text(document):
    """The document with one case per line."""
    lists = (
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(case)}" for case in rows) + "\n  ]"
        for name, rows in document.items()
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


if __name__ == "__main__":
    VALUES.write_text(as_text(values()))

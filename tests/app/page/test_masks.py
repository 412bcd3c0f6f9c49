"""The page's masks are those of `docs/masks.md`, bit for bit."""

import json

from tests.app.page.javascript import ROOT, call_all, needs_node

pytestmark = needs_node
PUBLISHED = json.loads((ROOT / "docs" / "masks.json").read_text())


def word(text):
    value = int(text, 16)
    return {"high": value >> 32, "low": value % 2**32}


def keys(case):
    names = {"nDraws": "n_draws", "sampler": "sampler", "replicate": "replicate"}
    return {"seed": {"$bigint": case["seed"]}} | {
        ours: case[theirs] for ours, theirs in names.items() if theirs in case
    }


def test_the_page_hashes_as_published():
    values = call_all([("masks.js", "hashWord", word(case["key"]), case["n"]) for case in PUBLISHED["hash"]])
    assert values == [word(case["value"]) for case in PUBLISHED["hash"]]


def test_the_page_keys_its_streams_as_published():
    calls = [("masks.js", "stream", keys(case), case["site"], case["purpose"]) for case in PUBLISHED["stream"]]
    assert call_all(calls) == [word(case["value"]) for case in PUBLISHED["stream"]]


def test_the_page_permutes_the_lattice_as_published():
    calls = [("masks.js", "rank", case["permutation"], case["n_draws"]) for case in PUBLISHED["rank"]]
    assert call_all(calls) == [case["value"] for case in PUBLISHED["rank"]]


def test_the_page_rounds_drop_probabilities_as_published():
    calls = [("masks.js", "threshold", case["drop_prob"]) for case in PUBLISHED["threshold"]]
    assert call_all(calls) == [case["value"] for case in PUBLISHED["threshold"]]


def test_the_page_draws_the_published_words():
    cases = PUBLISHED["words"]
    calls = [
        ("masks.js", "words", keys(case), case["site"], case["draw"], case["row"], case["units"]) for case in cases
    ]
    assert call_all(calls) == [case["value"] for case in cases]


def test_the_page_makes_the_published_masks():
    cases = PUBLISHED["masks"]
    calls = [
        ("masks.js", "keepMask", keys(case), case["site"], case["draw"], case["row"], case["units"], case["drop_prob"])
        for case in cases
    ]
    assert ["".join(map(str, mask)) for mask in call_all(calls)] == [case["value"] for case in cases]

"""Pipelines of transformers under draws."""

import pytest

from dropbayes.guests.pipelines import answers
from tests.guests.tutorials import TEXTS, language_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_answer_of_a_draw_is_listed_with_its_share():
    model, tokenizer = language_model(0.5)
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device=-1)
    found = answers(pipe, TEXTS[0], n_draws=20)[0]
    assert sum(entry["share"] for entry in found) == pytest.approx(1)
    assert all(0.5 <= entry["score"] <= 1 and entry["std"] > 0 for entry in found if entry["share"] > 0.1)
    assert [entry["share"] for entry in found] == sorted((entry["share"] for entry in found), reverse=True)


def test_tokens_are_told_apart_by_their_place():
    model, tokenizer = language_model(0.5)
    tokens = transformers.DistilBertForTokenClassification(model.config)
    pipe = transformers.pipeline("token-classification", model=tokens, tokenizer=tokenizer, device=-1, ignore_labels=[])
    found = answers(pipe, TEXTS[:2], n_draws=8)[1]
    for place in range(4):
        assert sum(entry["share"] for entry in found if entry["index"] == place) == pytest.approx(1)


def test_all_answers_to_a_single_input_are_listed():
    model, tokenizer = language_model(0.5)
    tokenizer.add_special_tokens({"mask_token": tokenizer.unk_token})
    words = transformers.DistilBertForMaskedLM(model.config)
    pipe = transformers.pipeline("fill-mask", model=words, tokenizer=tokenizer, device=-1)
    found = answers(pipe, f"the film was {tokenizer.mask_token}", n_draws=4, top_k=3)
    assert len(found) == 1 and sum(entry["share"] for entry in found[0]) == pytest.approx(3)


def test_a_pipeline_without_a_model_of_torch_or_without_scores_is_refused():
    with pytest.raises(TypeError, match="`pipe` must be a pipeline with a model of torch; got function"):
        answers(lambda texts: texts, TEXTS)
    model, tokenizer = language_model(0.5)
    pipe = transformers.pipeline("feature-extraction", model=model.distilbert, tokenizer=tokenizer, device=-1)
    with pytest.raises(TypeError, match="must give entries with a `score`"):
        answers(pipe, TEXTS[:1], n_draws=2)

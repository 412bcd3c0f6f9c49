"""Tests of the callback that reports held-out calibration and mutual information to a Trainer."""

import pytest
import torch
import transformers

import dropbayes as db
from dropbayes.language.callback import UncertaintyCallback
from dropbayes.scores import expected_calibration_error
from tests.language.tiny_models import tiny_model
from tests.sampling.sequence_models import sequence_model

pytest.importorskip("accelerate")

SMALL = {
    "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "num_labels": 3,
}  # fmt: skip


def rows(n=24, seed=0):
    """Rows whose class is in their second token."""
    tokens = torch.randint(3, 30, (n, 6), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[1] % 3} for row in tokens]


def batch_of(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def classifier(kind="Sequence"):
    torch.manual_seed(0)
    return getattr(transformers, f"BertFor{kind}Classification")(transformers.BertConfig(**SMALL)).eval()


def test_a_trainer_reports_the_numbers_after_every_evaluation(tmp_path):
    arguments = transformers.TrainingArguments(
        tmp_path, num_train_epochs=2, eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        per_device_train_batch_size=12, per_device_eval_batch_size=8, save_strategy="no", logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    held_out = rows(16, seed=1)
    model = classifier()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows(), eval_dataset=held_out,
                                   callbacks=[UncertaintyCallback(n_draws=4, seed=7)])  # fmt: skip
    trainer.train()
    reported = [line for line in trainer.state.log_history if "eval_mutual_information" in line]
    assert [line["epoch"] for line in reported] == [1.0, 2.0]
    assert trainer.evaluate()["eval_mc_calibration_error"] == pytest.approx(reported[-1]["eval_mc_calibration_error"])
    expected = UncertaintyCallback(n_draws=4, seed=7).measure(model, [batch_of(held_out[:8]), batch_of(held_out[8:])])
    assert {name: reported[-1][f"eval_{name}"] for name in expected} == pytest.approx(expected)


def test_the_numbers_are_those_of_predict():
    model, batch = classifier(), batch_of(rows(20, seed=2))
    labels = batch.pop("labels")
    prediction = db.predict(model, batch, likelihood=db.Categorical(), n_draws=5, seed=3)
    scores = UncertaintyCallback(n_draws=5, seed=3).measure(model, [{**batch, "labels": labels}])
    assert scores["mutual_information"] == pytest.approx(float(prediction.mutual_information.mean()), abs=1e-6)
    error = expected_calibration_error(prediction.mean.logits.double(), labels)  # type: ignore[attr-defined]
    assert scores["mc_calibration_error"] == pytest.approx(float(error), abs=1e-6)
    right = (model(**batch).logits.argmax(-1) == labels).double().mean()
    assert scores["plain_accuracy"] == pytest.approx(float(right))


def test_tokens_without_a_label_do_not_count():
    model, batch = classifier("Token"), batch_of(rows(4))
    labels = batch["input_ids"] % 3
    half = torch.where(torch.arange(6) < 3, labels, -100)
    callback = UncertaintyCallback(n_draws=3)
    whole, part = (callback.measure(model, [{**batch, "labels": each}]) for each in (labels, half))
    with torch.no_grad():
        right = (model(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1) == labels).double()
    assert whole["plain_accuracy"] == pytest.approx(float(right.mean()))
    assert part["plain_accuracy"] == pytest.approx(float(right[:, :3].mean()))


def test_a_language_model_is_judged_by_the_next_token():
    model = tiny_model("GPT2", resid_pdrop=0.1)
    ids = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(0))
    scores = UncertaintyCallback(n_draws=3).measure(model, [{"input_ids": ids, "labels": ids}])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss
    assert scores["plain_log_likelihood"] == pytest.approx(-float(loss), abs=1e-4)
    assert scores["mutual_information"] > 0


def test_a_decoder_reads_the_labels_before_the_one_it_is_judged_by():
    model, batch = sequence_model("bart").eval(), {"input_ids": torch.randint(3, 30, (4, 6)), "note": ["a text"] * 4}
    labels = torch.randint(3, 30, (4, 6))
    scores = UncertaintyCallback(n_draws=3).measure(model, [{**batch, "labels": labels}])
    with torch.no_grad():
        loss = model(batch["input_ids"], labels=labels).loss
    assert scores["plain_log_likelihood"] == pytest.approx(-float(loss), abs=1e-4)


def test_the_model_is_left_as_it_was():
    model = classifier().train()
    UncertaintyCallback(n_draws=3).measure(model, [batch_of(rows(6))])
    assert all(module.training for module in model.modules())


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="`n_draws` must be a whole number, at least 1"):
        UncertaintyCallback(n_draws=0)
    callback, batch = UncertaintyCallback(n_draws=2), batch_of(rows(3))
    with pytest.raises(ValueError, match="must have `labels`"):
        callback.measure(classifier(), [{"input_ids": batch["input_ids"]}])
    with pytest.raises(ValueError, match="labels other than -100"):
        callback.measure(classifier(), [{**batch, "labels": torch.full((3,), -100)}])
    with pytest.raises(ValueError, match="classes of rows or tokens"):
        callback.measure(classifier(), [{**batch, "labels": torch.zeros(3, 2)}])

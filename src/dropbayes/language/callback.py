"""Uncertainty in the log of a training run: a callback for the Trainer of transformers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from dropbayes.likelihoods import Categorical, output_tensor
from dropbayes.predictive import predict
from dropbayes.runtime.batches import network_arguments
from dropbayes.runtime.validation import check_count
from dropbayes.sampling import evaluation_output
from dropbayes.scores import accuracy, class_log_likelihood, expected_calibration_error


class UncertaintyCallback(TrainerCallback):
    """Reports the scores of Monte Carlo dropout on the held-out rows whenever a `Trainer` evaluates.

    Adds to the metrics that `Trainer.evaluate` returns, and to the log history: the log-likelihood, the accuracy and
    the expected calibration error of the mean over draws, those of the pass without dropout (`plain_`), and the mean
    mutual information of outcome and weights. For classes of rows, of tokens, and of the next token.

    Example:
        trainer = Trainer(model, arguments, ..., callbacks=[UncertaintyCallback()])
    """

    def __init__(self, n_draws: int = 20, seed: int = 0) -> None:
        check_count("n_draws", n_draws)
        self.n_draws, self.seed = n_draws, seed

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **context: Any) -> None:
        """Called by the trainer after its own evaluation."""
        values = self.measure(context["model"], context["eval_dataloader"])
        prefix = next((key.removesuffix("loss") for key in metrics if key.endswith("_loss")), "eval_")
        named = {f"{prefix}{name}": value for name, value in values.items()}
        metrics.update(named)
        state.log_history.append({**named, "epoch": state.epoch, "step": state.global_step})

    def measure(self, model: nn.Module, batches: Any) -> dict[str, float]:
        """The scores of a classifier of rows or tokens, or of a causal language model.

        `batches` is a DataLoader or a list of dicts: named inputs with `labels`.
        """
        columns = [self._columns(model, batch) for batch in batches]
        if not sum(len(labels) for *_, labels in columns):
            raise ValueError("the evaluation rows must have labels other than -100; they have none.")
        drawn, plain, information, labels = (torch.cat(column) for column in zip(*columns, strict=True))
        scores = {"mutual_information": float(information.mean())}
        for prefix, probabilities in (("mc_", drawn), ("plain_", plain)):
            scores[f"{prefix}accuracy"] = float(accuracy(probabilities, labels))
            scores[f"{prefix}calibration_error"] = float(expected_calibration_error(probabilities, labels))
            scores[f"{prefix}log_likelihood"] = float(class_log_likelihood(probabilities, labels).mean())
        return scores

    def _columns(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Probabilities over draws and without dropout, mutual information and label of every outcome."""
        if "labels" not in batch:
            raise ValueError(f"the evaluation batches must have `labels`; got {sorted(batch)}.")
        device = next(model.parameters()).device
        tensors = {name: value.to(device) for name, value in batch.items() if torch.is_tensor(value)}
        labels, inputs = tensors["labels"], network_arguments(model, tensors)
        settings: dict[str, Any] = {"n_draws": self.n_draws, "seed": self.seed, "progress": False}
        prediction = predict(model, inputs, likelihood=Categorical(class_axis=-1), **settings)
        plain = output_tensor(evaluation_output(model, inputs)).float().softmax(-1)
        drawn, information = output_tensor(prediction.mean), prediction.mutual_information
        can_generate = getattr(model, "can_generate", bool)
        if can_generate() and not model.config.is_encoder_decoder and labels.dim() == 2:  # of the next token
            drawn, plain, information, labels = drawn[:, :-1], plain[:, :-1], information[:, :-1], labels[:, 1:]
        if labels.shape != drawn.shape[:-1]:
            rule = f"be classes of rows or tokens, of shape {tuple(drawn.shape[:-1])}"
            raise ValueError(f"the labels must {rule}; got {tuple(labels.shape)}.")
        counted = labels != -100  # which transformers leaves out of its losses
        return (*(values[counted].cpu().double() for values in (drawn, plain, information)), labels[counted].cpu())

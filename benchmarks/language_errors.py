"""Do the scores of a language model find its wrong answers? python -m benchmarks.language_errors

A model of two layers learns a knowledge base in which the truth is known: the town, the trade and the guild of people
with a first and a last name. A value has one to four wordings, between which every telling chooses at random. Some facts
are told often, some once in a while, and half of the people are never told about, though both their names are. It is then asked for every fact of everybody, and each
score ranks the answers by how wrong they may be: the area under the ROC curve is the chance that a wrong answer is
ranked above a right one. Figures are means over models of several seeds, with their standard errors.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

import dropbayes as db
from benchmarks import history
from dropbayes.scores import auroc

SEEDS, N_DRAWS = 4, 24
NAMES, VALUES, RELATIONS, WORDINGS = 20, 20, 3, 4
TOLD, STEPS, BATCH = 130, 900, 64

PAD, END, FIRST = 0, 1, 2
LAST = FIRST + NAMES
RELATION = LAST + NAMES
VALUE = RELATION + RELATIONS
VOCABULARY = VALUE + RELATIONS * VALUES * WORDINGS

SCORES = {
    "probability of the answer, no dropout": "plain_log_prob",
    "entropy, no dropout": "plain_entropy",
    "entropy over meanings, no dropout": "plain_semantic_entropy",
    "probability of the answer, mean of the draws": "log_prob",
    "predictive entropy": "entropy",
    "mutual information": "mutual_information",
    "variance of the log-probability over draws": "variance",
    "disagreement of the draws": "disagreement",
    "semantic entropy of the draws' texts": "semantic_entropy",
}


def knowledge(source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """All people as pairs of names, the value of each relation of each, and how often each fact is told."""
    people = torch.cartesian_prod(torch.arange(NAMES), torch.arange(NAMES))
    people = people[torch.randperm(len(people), generator=source)][: 2 * TOLD]
    truth = torch.randint(0, VALUES, (len(people), RELATIONS), generator=source)
    often = torch.rand(len(people), RELATIONS, generator=source).pow(3) + 0.005
    often[TOLD:] = 0.0
    return people, truth, often


def questions(people: Tensor) -> Tensor:
    """The question after every relation of each person, `[person * relation, token]`."""
    asked = torch.cartesian_prod(torch.arange(len(people)), torch.arange(RELATIONS))
    return torch.cat([people[asked[:, 0]] + torch.tensor([FIRST, LAST]), asked[:, 1:] + RELATION], 1)


def wording(relation: Tensor, value: Tensor, word: Tensor) -> Tensor:
    return VALUE + (relation * VALUES + value) * WORDINGS + word


# What each token means, whichever its wording: the number of a value, or for other tokens one beyond them.
MEANINGS = torch.tensor([(t - VALUE) // WORDINGS if t >= VALUE else RELATIONS * VALUES + t for t in range(VOCABULARY)])


def trained_model(people: Tensor, truth: Tensor, often: Tensor, source: torch.Generator) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=8, bos_token_id=END, eos_token_id=END,
        pad_token_id=PAD,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=STEPS)
    asked, values = questions(people), truth.flatten()
    for _ in range(STEPS):
        rows = torch.multinomial(often.flatten(), BATCH, replacement=True, generator=source)
        words = torch.randint(0, 12, (BATCH,), generator=source) % (1 + values[rows] % WORDINGS)
        answers = wording(asked[rows, 2] - RELATION, values[rows], words)
        text = torch.cat([asked[rows], answers[:, None], torch.full((BATCH, 1), END)], 1)
        optimiser.zero_grad()
        labels = text.clone()
        labels[:, :3] = -100  # who is asked for what is not to be learnt
        model(input_ids=text, labels=labels).loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def scored_answers(model: Any, asked: Tensor) -> dict[str, Tensor]:
    """The answer of the mean of the draws to each question, and its scores: larger ones for less certain answers."""
    with torch.no_grad():
        plain = model(input_ids=asked).logits[:, -1].double().log_softmax(-1)
    options = {"n_draws": N_DRAWS, "max_new_tokens": 1}
    result = db.language.generate(model, asked, **options)
    texts = db.language.generate(model, asked, per_draw=True, do_sample=True, **options)
    answers = texts.tokens[..., 0].T.tolist()
    return {
        "answer": result.tokens[:, 0],
        "plain_answer": plain.argmax(-1),
        "plain_log_prob": -plain.amax(-1),
        "plain_entropy": torch.special.entr(plain.exp()).sum(-1),
        "plain_semantic_entropy": torch.special.entr(
            torch.zeros(len(asked), VOCABULARY, dtype=torch.float64).index_add(1, MEANINGS, plain.exp())
        ).sum(-1),
        "log_prob": -result.product_of_expectations.log_prob,
        "entropy": result.product_of_expectations.total,
        "mutual_information": result.product_of_expectations.knowledge,
        "variance": result.draw_log_probs[..., 0].var(0),
        "disagreement": result.token_disagreement[:, 0],
        "semantic_entropy": torch.tensor(
            [db.language.semantic_entropy(some, lambda a, b: bool(MEANINGS[a] == MEANINGS[b])) for some in answers]
        ),
    }


def measured(seed: int) -> dict[str, Any]:
    """For all people, and for those the model was told about: how often it is wrong, and the AUROC of each score."""
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    people, truth, often = knowledge(source)
    found = scored_answers(trained_model(people, truth, often, source), questions(people))
    means = torch.arange(RELATIONS).repeat(len(people)) * VALUES + truth.flatten()
    wrong, plain_wrong = MEANINGS[found["answer"]] != means, MEANINGS[found["plain_answer"]] != means
    told = torch.arange(len(wrong)) < TOLD * RELATIONS
    figures: dict[str, Any] = {}
    for name, rows in {"everybody": torch.ones_like(told), "people told about": told}.items():
        areas = {}
        for score in SCORES.values():
            event = plain_wrong if score.startswith("plain") else wrong
            areas[score] = float(auroc(found[score][rows].double(), event[rows]))
        figures[name] = {"wrong": float(wrong[rows].double().mean()), "auroc": areas}
        figures[name]["plain_wrong"] = float(plain_wrong[rows].double().mean())
    return figures


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean and the standard error over runs of every figure."""
    figures: dict[str, Any] = {}
    for group in runs[0]:
        columns = {"wrong": [run[group]["wrong"] for run in runs]}
        columns |= {score: [run[group]["auroc"][score] for run in runs] for score in SCORES.values()}
        figures[group] = {
            name: {"mean": statistics.fmean(values), "error": statistics.stdev(values) / math.sqrt(len(values))}
            for name, values in columns.items()
        }
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures as the table of the page."""
    shares = [f"{100 * figures[group]['wrong']['mean']:.0f} %" for group in figures]
    heads = [f"{group} ({share} wrong)" for group, share in zip(figures, shares, strict=True)]
    lines = [f"| AUROC of a wrong answer by | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, score in SCORES.items():
        cells = [f"{figures[group][score]['mean']:.3f} ± {figures[group][score]['error']:.3f}" for group in figures]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    torch.set_num_threads(1)
    figures = summary([measured(seed) for seed in range(SEEDS)])
    print(table(figures))
    settings = {"seeds": SEEDS, "draws": N_DRAWS, "steps": STEPS, "people": 2 * TOLD, "told": TOLD}
    history.write("language_errors", {"settings": settings, "figures": figures})


if __name__ == "__main__":
    main()

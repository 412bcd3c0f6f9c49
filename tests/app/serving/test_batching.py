"""Batches change when a row is predicted, and nothing else."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra `serve` is not installed")

from starlette.exceptions import HTTPException

import dropbayes as db
from dropbayes.app.serving import batching
from dropbayes.app.serving.batching import Batches


@pytest.fixture(scope="module")
def predictor(models):
    return db.Predictor.load(models / "numbers")


@pytest.fixture
def rows():
    return np.random.default_rng(0).normal(size=(40, 5))


def same_bits(one, other):
    return all(np.array_equal(one[name], other[name]) for name in other)


async def predicted_together(batches, jobs):
    answers = await asyncio.gather(*(batches.predict(*job) for job in jobs))
    await batches.close()
    return answers


def test_requests_together_have_the_bits_of_each_alone(predictor, rows):
    sizes = []
    batches = Batches(np.inf, sizes.append)
    jobs = [
        (predictor, rows[:1]),
        (predictor, rows[1:1]),
        (predictor, rows[2:9]),
        (predictor.with_settings(seed=4), rows),
    ]
    answers = asyncio.run(predicted_together(batches, jobs * 5))
    assert all(same_bits(answer, p.predict_inputs(x)) for answer, (p, x) in zip(answers, jobs * 5, strict=True))
    assert len(sizes) < len(answers) and sum(sizes) == 5 * 48


def test_a_long_request_does_not_keep_a_short_one_waiting(predictor, rows, monkeypatch):
    monkeypatch.setattr(batching, "_BATCH_DRAWS", 1)
    monkeypatch.setattr(batching, "_MIN_ROWS", 4)
    order = []

    async def run():
        batches = Batches(max_seconds=np.inf)

        async def one(name, x):
            answer = await batches.predict(predictor, x)
            order.append(name)
            return answer

        answers = await asyncio.gather(one("long", rows), one("short", rows[:2]))
        await batches.close()
        return answers

    answers = asyncio.run(run())
    assert order == ["short", "long"]
    assert same_bits(answers[0], predictor.predict_inputs(rows))


class FewDraws:
    key, total_draws = "few", 2

    def predict_inputs(self, x):
        return {"mean": x[:, 0]}


def test_rows_of_few_draws_come_in_batches_of_some_thousands():
    sizes = []
    jobs = [(FewDraws(), np.zeros((9000, 1)))] * 20
    answers = asyncio.run(predicted_together(Batches(np.inf, sizes.append), jobs))
    assert all(len(answer["mean"]) == 9000 for answer in answers)
    assert max(sizes) <= 2**13 and sum(sizes) == 20 * 9000


def test_the_fault_of_one_request_is_not_that_of_its_neighbours(predictor, rows):
    async def run():
        batches = Batches(max_seconds=np.inf)
        jobs = [batches.predict(predictor, x) for x in (rows[:3], rows[:3, :2], rows[3:5])]
        answers = await asyncio.gather(*jobs, return_exceptions=True)
        await batches.close()
        return answers

    first, second, third = asyncio.run(run())
    assert isinstance(second, ValueError)
    assert same_bits(first, predictor.predict_inputs(rows[:3])) and same_bits(
        third, predictor.predict_inputs(rows[3:5])
    )


def test_closing_finishes_what_waits_and_takes_no_more(predictor, rows):
    async def run():
        batches = Batches(max_seconds=np.inf)
        waiting = [asyncio.ensure_future(batches.predict(predictor, rows)) for _ in range(3)]
        await asyncio.sleep(0)
        await batches.close()
        answers = await asyncio.gather(*waiting)
        with pytest.raises(RuntimeError, match="shutting down"):
            await batches.predict(predictor, rows)
        return answers

    assert all(same_bits(answer, predictor.predict_inputs(rows)) for answer in asyncio.run(run()))


def test_work_that_could_not_be_done_in_time_is_refused_and_light_work_is_not(predictor, rows):
    predictor = predictor.with_settings(n_draws=32)

    async def run():
        batches = Batches(max_seconds=1.0)
        batches._draws_per_second = 2.5 * len(rows) * predictor.total_draws
        heavy = [asyncio.ensure_future(batches.predict(predictor, rows)) for _ in range(6)]
        light = [asyncio.ensure_future(batches.predict(predictor, rows[:1])) for _ in range(6)]
        answers = await asyncio.gather(*heavy, *light, return_exceptions=True)
        await batches.close()
        return answers

    answers = asyncio.run(run())
    refused = [isinstance(answer, HTTPException) and answer.status_code == 429 for answer in answers]
    assert not any(refused[:2]) and any(refused[2:6]) and not any(refused[6:])


def test_a_long_request_is_taken_where_only_light_ones_wait(predictor, rows):
    predictor = predictor.with_settings(n_draws=32)

    async def run():
        batches = Batches(max_seconds=1.0)
        batches._draws_per_second = 0.5 * len(rows) * predictor.total_draws
        jobs = [batches.predict(predictor, x) for x in (rows[:1], rows[1:2], rows)]
        answers = await asyncio.gather(*jobs)
        await batches.close()
        return answers

    assert same_bits(asyncio.run(run())[2], predictor.predict_inputs(rows))


def test_of_equal_requests_the_oldest_is_finished_first(predictor, rows, monkeypatch):
    monkeypatch.setattr(batching, "_BATCH_DRAWS", 1)
    monkeypatch.setattr(batching, "_MIN_ROWS", 4)
    order = []

    async def run():
        batches = Batches(max_seconds=np.inf)

        async def one(name):
            await batches.predict(predictor, rows[:12])
            order.append(name)

        await asyncio.gather(*(one(name) for name in range(4)))
        await batches.close()

    asyncio.run(run())
    assert order == [0, 1, 2, 3]


def test_a_request_that_was_given_up_costs_no_further_work(predictor, rows, monkeypatch):
    monkeypatch.setattr(batching, "_BATCH_DRAWS", 1)
    monkeypatch.setattr(batching, "_MIN_ROWS", 1)
    sizes = []

    async def run():
        begun = asyncio.Event()
        batches = Batches(np.inf, lambda size: (sizes.append(size), begun.set()))
        job = asyncio.ensure_future(batches.predict(predictor, rows))
        await begun.wait()
        job.cancel()
        await batches.close()

    asyncio.run(run())
    assert sum(sizes) < len(rows)

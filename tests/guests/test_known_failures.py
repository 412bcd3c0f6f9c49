"""Failures that users of the frameworks have reported: their way gives zero or something else, ours what is right."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.guests import each_draw, predict_through
from tests.guests.tutorials import N_DRAWS, TEXTS, Bare, X, Y, language_model, lightning_module, loader

pytestmark = pytest.mark.filterwarnings("ignore")


def test_lightning_predicts_in_evaluation_mode_whatever_the_user_did():
    """Lightning#21410: `Trainer.predict` sets evaluation mode again, and T passes are one."""
    pytest.importorskip("lightning", reason="lightning is not installed: `make test-guests` installs it")
    module, trainer = lightning_module(0.3)
    module.train()
    passes = torch.stack([torch.cat(trainer.predict(module, loader(targets=False))) for _ in range(5)])
    assert passes.var(0).max() == 0
    assert db.predict(module, loader()).epistemic.min() > 0


def test_a_lightning_module_whose_prediction_is_not_its_forward_is_refused():
    """A draw of `forward` would be none of what `predict_step` gives."""
    pytest.importorskip("lightning", reason="lightning is not installed: `make test-guests` installs it")
    module, trainer = lightning_module(0.3, predict_step=lambda self, batch, index: self.model(batch) * 10)
    run = lambda: torch.cat(trainer.predict(module, loader(targets=False)))  # noqa: E731
    with pytest.raises(ValueError, match=r"Regression was never called.*Pass the module that is called"):
        predict_through(module, run, n_draws=3)
    ours, bare = predict_through(module.model, run, n_draws=3).mean, db.draws(module.model, X, n_draws=3).mean(0)
    torch.testing.assert_close(ours, 10 * bare)


def test_training_mode_moves_the_statistics_of_batch_normalisation():
    """The usual recipe, `net.train()` and T passes, leaves another network behind."""
    net = Bare(0.3)
    net(X)
    net.eval()
    plain, theirs = net(X).detach(), copy.deepcopy(net).train()
    theirs_draws = torch.stack([theirs(X).detach() for _ in range(50)])
    assert (theirs.eval()(X) - plain).abs().max() > 0.1
    ours = db.predict(net, X, n_draws=50)
    assert torch.equal(net.eval()(X), plain)
    reference = copy.deepcopy(net)  # dropout alone in training mode
    for module in reference.modules():
        module.training = isinstance(module, nn.Dropout)
    reference_draws = torch.stack([reference(X).detach() for _ in range(2000)])
    right, wrong = (ours.mean - reference_draws.mean(0)).abs(), (theirs_draws.mean(0) - reference_draws.mean(0)).abs()
    assert wrong.mean() > 3 * right.mean()


def test_kerass_training_argument_moves_batch_normalisation():
    """keras#9412: `training=True` switches dropout and BatchNormalization."""
    keras = pytest.importorskip("keras", reason="keras is not installed: `make test-guests` installs it")
    from dropbayes.guests.keras import KerasNetwork

    layers = keras.layers
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    model.fit(X.numpy(), Y.numpy(), epochs=1, verbose=0)
    before = [torch.as_tensor(weight) for weight in model.get_weights()]
    prediction = db.predict(KerasNetwork(model), X, n_draws=20)
    assert prediction.epistemic.min() > 0
    assert all(map(torch.equal, before, map(torch.as_tensor, model.get_weights())))
    assert (
        model.predict(X.numpy(), verbose=0).std() > 0
        and (model.predict(X.numpy(), verbose=0) == model.predict(X.numpy(), verbose=0)).all()
    )
    model(X, training=True)
    assert not all(map(torch.equal, before, map(torch.as_tensor, model.get_weights())))


def test_a_pipeline_of_a_loaded_model_is_deterministic():
    """A model that was loaded is in evaluation mode, and the pipeline has no switch."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, tokenizer = language_model(0.3)
    pipe = transformers.pipeline("text-classification", model=model.eval(), tokenizer=tokenizer, device=-1)
    assert len({pipe(TEXTS[0])[0]["score"] for _ in range(5)}) == 1
    assert len({run[0]["score"] for run in each_draw(model, lambda: pipe(TEXTS[0]), n_draws=N_DRAWS)}) == N_DRAWS


def test_compiled_things_that_hold_no_module_are_refused():
    net = Bare(0.3)
    with pytest.raises(TypeError, match=r"`net` must be a torch\.nn\.Module; got function"):
        db.predict(torch.compile(lambda x: net(x)), X)
    with pytest.raises(TypeError, match="scripted or traced"):
        db.predict(torch.jit.trace(net.eval(), X), X)
    with pytest.raises(TypeError, match="exported"):
        db.predict(torch.export.export(net, (X,)).module(), X)


def test_sharded_weights_are_refused_until_they_are_gathered(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    expected = db.predict(Bare(0.3), X, n_draws=N_DRAWS).mean
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net: Any = fully_shard(Bare(0.3))
        with pytest.raises(ValueError, match=r"must hold its whole weights; 'net\.0\.weight' is sharded.*net\.unshard"):
            db.predict(net, X)
        if hasattr(torch.cpu.Stream, "record_event"):  # torch 2.6 gathers on GPUs only
            net.unshard()
            torch.testing.assert_close(db.predict(net, X, n_draws=N_DRAWS).mean, expected)
        net = FullyShardedDataParallel(Bare(0.3), device_id=torch.device("cpu"))
        with FullyShardedDataParallel.summon_full_params(net):
            assert torch.equal(db.predict(net.module, X, n_draws=N_DRAWS).mean, expected)
    finally:
        distributed.destroy_process_group()

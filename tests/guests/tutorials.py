"""The frameworks' own tutorials, small, each with at most two lines of ours.

A tutorial is a function of the drop probability that gives a `Visit`: `ours` is what a user of the framework writes,
`bare` the same draws of the network alone, without the framework. A framework is imported when its tutorial is run.
"""

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from dropbayes import guests
from dropbayes.predictive.statistics import Request, RowStatistics

os.environ.setdefault("KERAS_BACKEND", "torch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

N_DRAWS = 6
X = torch.linspace(-1, 1, 48).view(12, 4) + torch.sin(torch.arange(48.0)).view(12, 4)
Y = X.sum(1, keepdim=True)
ROWS, WHOLE = db.Sampling(), db.Sampling(row_axis=None)


@dataclass
class Visit:
    """A framework with its model: our lines, and the network alone."""

    model: Any  # a module of torch
    ours: Callable[[], Any]  # tensors, or a list of them
    bare: Callable[[], Any]
    other_batches: Callable[[], Any] | None = None  # `ours` with another size of batches
    state: Callable[[], Any] = lambda: None  # of a trainer
    own: Callable[[], Any] = lambda: None  # what the framework does itself, which may set modes and draw
    atol: float = 0.0  # between sizes of batches, where the framework calls the network itself


class Bare(nn.Module):
    """A network with normalisation, so that what switches it with dropout shows."""

    def __init__(self, drop_prob: float, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        drop = nn.Dropout(drop_prob)
        self.net = nn.Sequential(
            nn.Linear(4, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            drop,
            nn.Linear(16, 16),
            nn.ReLU(),
            drop,
            nn.Linear(16, outputs),
        )

    def forward(self, X):
        return self.net(X)


def repeated(procedure):
    return lambda: [procedure() for _ in range(N_DRAWS)]


def moments(prediction):
    return [prediction.mean, prediction.epistemic]


def moments_of(results):
    """Mean and variance of tensors, one for each draw, as `predict` computes them."""
    statistics = RowStatistics(Request())
    for result in results:
        statistics.add(torch.as_tensor(result)[None], None)
    return [statistics.results()["mean"], statistics.results()["epistemic"]]


def function_draws(net, *inputs, output=lambda out: out):
    """Each draw of a copy of a network, as a function of batches of inputs."""
    net = copy.deepcopy(net)
    draws = [db.function_draw(net, index, n_draws=N_DRAWS) for index in range(N_DRAWS)]
    with torch.no_grad():
        return [torch.cat([output(draw(batch)) for batch in inputs]) for draw in draws]


def inputs_of(net, procedure):
    """The arguments of the last call of a network in a procedure."""
    seen = []
    handle = net.register_forward_pre_hook(lambda module, args: seen.append(args))
    procedure()
    handle.remove()
    return seen[-1]


def loader(size=5, *, targets=True):
    # Its own generator: an iteration over a loader draws a number for its workers.
    return DataLoader(TensorDataset(X, Y) if targets else X, batch_size=size, generator=torch.Generator())


def lightning_module(drop_prob, predict_step=None):
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Bare(drop_prob)

        def forward(self, x):
            return self.model(x)

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

    if predict_step is not None:
        Regression.predict_step = predict_step
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Regression()
    trainer.fit(module, loader())
    return module, trainer


def trainer_state(trainer):
    return lambda: (trainer.global_step, trainer.current_epoch, copy.deepcopy(trainer.callback_metrics))


def lightning_network(drop_prob):
    module, trainer = lightning_module(drop_prob)
    return Visit(
        module,
        ours=lambda: moments(db.predict(module, loader(), n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(copy.deepcopy(module.model), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(module, loader(12), n_draws=N_DRAWS)),
        state=trainer_state(trainer),
    )


def lightning_step(drop_prob):
    module, trainer = lightning_module(
        drop_prob, predict_step=lambda self, batch, index: db.predict(self, batch[0], n_draws=N_DRAWS)
    )

    def ours(size=5):
        parts = trainer.predict(module, loader(size))
        return [torch.cat([part.mean for part in parts]), torch.cat([part.epistemic for part in parts])]

    bare = lambda: moments(db.predict(copy.deepcopy(module.model), X, n_draws=N_DRAWS))  # noqa: E731
    return Visit(module, ours, bare, lambda: ours(12), lambda: trainer.global_step)


def lightning_trainer(drop_prob):
    module, trainer = lightning_module(drop_prob)

    def procedure(size=5):
        return torch.cat(trainer.predict(module, loader(size, targets=False)))

    def ours(size=5):
        return moments(guests.predict_through(module, lambda: procedure(size), n_draws=N_DRAWS))

    bare = lambda: moments_of(function_draws(module.model, *X.split(5)))  # noqa: E731
    return Visit(module, ours, bare, lambda: ours(12), lambda: trainer.global_step, repeated(procedure), 1e-6)


def fabric(drop_prob):
    from lightning.fabric import Fabric

    net = Bare(drop_prob)
    net, _ = Fabric(accelerator="cpu", devices=1).setup(net, torch.optim.Adam(net.parameters()))
    return Visit(
        net,
        ours=lambda: moments(db.predict(net, loader(), n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(Bare(drop_prob), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(net, loader(12), n_draws=N_DRAWS)),
    )


def accelerate(drop_prob):
    from accelerate import Accelerator

    net, batches, others = Accelerator(cpu=True).prepare(Bare(drop_prob), loader(), loader(12))
    return Visit(
        net,
        ours=lambda: moments(db.predict(net, batches, n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(Bare(drop_prob), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(net, others, n_draws=N_DRAWS)),
    )


def compiled(drop_prob):
    net = torch.compile(Bare(drop_prob), backend="eager")
    return Visit(
        net,
        ours=lambda: moments(db.predict(net, loader(), n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(Bare(drop_prob), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(net, loader(12), n_draws=N_DRAWS)),
    )


def compiled_procedure(drop_prob):
    net: Any = torch.compile(Bare(drop_prob), backend="eager")
    ours = lambda: moments(guests.predict_through(net, lambda: net(X), n_draws=N_DRAWS))  # noqa: E731
    return Visit(net, ours, lambda: moments_of(function_draws(Bare(drop_prob), X)))


def data_parallel(drop_prob):
    net = nn.DataParallel(Bare(drop_prob))
    return Visit(
        net,
        ours=lambda: moments(db.predict(net, loader(), n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(Bare(drop_prob), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(net, loader(12), n_draws=N_DRAWS)),
    )


def skorch(drop_prob):
    from skorch import NeuralNetRegressor

    net = NeuralNetRegressor(Bare, module__drop_prob=drop_prob, max_epochs=2, verbose=0, iterator_valid__shuffle=False)
    net.fit(X.numpy(), Y.numpy())

    def ours(size=5):
        batches = net.get_iterator(net.get_dataset(X.numpy()))
        batches = DataLoader(batches.dataset, batch_size=size, generator=torch.Generator())
        return moments(db.predict(net.module_, batches, n_draws=N_DRAWS))

    bare = lambda: moments(db.predict(copy.deepcopy(net.module_), X, n_draws=N_DRAWS))  # noqa: E731
    return Visit(net.module_, ours, bare, lambda: ours(12), lambda: len(net.history))


def skorch_predict(drop_prob):
    from skorch import NeuralNetRegressor

    net = NeuralNetRegressor(Bare, module__drop_prob=drop_prob, max_epochs=1, verbose=0, batch_size=5)
    net.fit(X.numpy(), Y.numpy())
    ours = lambda: moments(guests.predict_through(net.module_, lambda: net.predict(X.numpy()), n_draws=N_DRAWS))  # noqa: E731
    bare = lambda: moments_of(function_draws(net.module_, *X.split(5)))  # noqa: E731
    own = repeated(lambda: net.predict(X.numpy()))
    return Visit(net.module_, ours, bare, state=lambda: len(net.history), own=own)


class OfKeras(nn.Module):
    """The operations of the Keras model below, in torch."""

    def __init__(self, model, drop_prob):
        super().__init__()
        self.drop = nn.Dropout(drop_prob)
        self.weights = [torch.as_tensor(weight) for weight in model.get_weights()]

    def forward(self, x):
        kernel, bias, gamma, beta, mean, variance, last, end = self.weights
        x = torch.relu(torch.add(torch.matmul(x, kernel), bias))
        x = x.subtract(mean).mul_(variance.add(1e-3).rsqrt_().mul(gamma)).add_(beta)
        return torch.add(torch.matmul(self.drop(x), last), end)


def keras(drop_prob):
    import keras

    from dropbayes.guests.keras import KerasNetwork

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(drop_prob),
         layers.Dense(1)]
    )  # fmt: skip
    model.compile("adam", "mse")
    model.fit(X.numpy(), Y.numpy(), epochs=2, verbose=0)
    return Visit(
        model,
        ours=lambda: moments(db.predict(KerasNetwork(model), loader(), n_draws=N_DRAWS)),
        bare=lambda: moments(db.predict(OfKeras(model, drop_prob), X, n_draws=N_DRAWS)),
        other_batches=lambda: moments(db.predict(KerasNetwork(model), loader(12), n_draws=N_DRAWS)),
        state=lambda: [np.array(variable) for variable in model.variables],
        atol=1e-6,
    )


def graphs(drop_prob):
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Regression(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.last = GCNConv(4, 8), GCNConv(8, 8), nn.Linear(8, 1)

        def forward(self, data):
            x = self.first(data.x, data.edge_index).relu()
            x = nn.functional.dropout(x, drop_prob, training=self.training)
            return self.last(global_mean_pool(self.second(x, data.edge_index).relu(), data.batch))

    torch.manual_seed(1)
    made = [Data(x=torch.randn(n, 4), edge_index=torch.randint(0, n, (2, 3 * n))) for n in (4, 5, 6, 7, 4)]
    net, batches = Regression(), GraphLoader(made, batch_size=2)

    def bare():
        alone = copy.deepcopy(net)
        parts = [db.predict(alone, (batch,), n_draws=N_DRAWS, sampling=WHOLE) for batch in batches]
        return [torch.cat([part.mean for part in parts]), torch.cat([part.epistemic for part in parts])]

    return Visit(net, lambda: moments(db.predict(net, batches, n_draws=N_DRAWS, sampling=WHOLE)), bare)


def molecules(drop_prob):
    from chemprop import data, featurizers, models
    from chemprop import nn as parts

    points = [data.MoleculeDatapoint.from_smi(smi, [float(len(smi))]) for smi in ("CCO", "c1ccccc1", "CC(=O)O", "CCN")]
    batches = data.build_dataloader(
        data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer()), batch_size=2, shuffle=False
    )
    torch.manual_seed(0)
    net = models.MPNN(
        parts.BondMessagePassing(d_h=16, depth=2, dropout=drop_prob), parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=16, hidden_dim=16, dropout=drop_prob),
    )  # fmt: skip

    def bare():
        alone = copy.deepcopy(net)
        made = [db.predict(alone, (batch.bmg,), n_draws=N_DRAWS, sampling=WHOLE) for batch in batches]
        return [torch.cat([part.mean for part in made]), torch.cat([part.epistemic for part in made])]

    return Visit(net, lambda: moments(db.predict(net, batches, n_draws=N_DRAWS, sampling=WHOLE)), bare)


def volumes(drop_prob):
    from monai.inferers import SlidingWindowInferer
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), dropout=drop_prob)
    volume = torch.randn(1, 1, 16, 24)
    tiles = [volume[..., start : start + 8] for start in (0, 8, 16)]

    def ours(size=1):
        inferer = SlidingWindowInferer(roi_size=(16, 8), sw_batch_size=size, overlap=0)
        return moments(guests.predict_through(net, lambda: inferer(volume, net), n_draws=N_DRAWS))

    def bare():
        draws = function_draws(net, *tiles)
        return moments_of(torch.cat(list(draw[:, None]), -1) for draw in draws)

    return Visit(net, ours, bare, lambda: ours(3), atol=1e-5)


def language_model(drop_prob):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "the", "film", "was", "good", "bad", "dull", "great", "awful"]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="[UNK]", pad_token="[PAD]")
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=len(words), dim=16, hidden_dim=32, n_layers=1, n_heads=2, max_position_embeddings=16, num_labels=2,
        dropout=drop_prob, attention_dropout=drop_prob, seq_classif_dropout=drop_prob,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config), tokenizer


TEXTS = ["the film was good", "the film was awful", "good", "the dull film"]


def pipeline(drop_prob):
    from transformers import pipeline

    from dropbayes.guests.pipelines import answers

    model, tokenizer = language_model(drop_prob)
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device=-1)

    def ours(size=1):
        found = answers(pipe, TEXTS, n_draws=N_DRAWS, top_k=None, batch_size=size)
        found = [sorted(entries, key=lambda entry: entry["label"]) for entries in found]
        return [torch.tensor([[entry[item] for entry in one] for one in found]) for item in ("score", "std")]

    def bare():
        inputs = [dict(tokenizer([text], return_tensors="pt")) for text in TEXTS]
        draws = [logits.numpy() for logits in function_draws(model, *inputs, output=lambda out: out.logits)]
        exponents = [np.exp(logits - logits.max(1, keepdims=True)) for logits in draws]
        scores = np.stack([one / one.sum(1, keepdims=True) for one in exponents]).astype(np.float64)
        return [torch.as_tensor(scores.mean(0)).float(), torch.as_tensor(scores.std(0)).float()]

    def own():  # a pipeline draws where its model is in training mode
        mode = model.training
        model.eval()
        repeated(lambda: pipe(TEXTS, top_k=None, batch_size=1))()
        model.train(mode)

    return Visit(model, ours, bare, lambda: ours(4), own=own, atol=1e-5)


def hugging_face_trainer(drop_prob):
    import tempfile

    from transformers import Trainer, TrainingArguments

    model, tokenizer = language_model(drop_prob)
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    rows = [{**{key: value[i] for key, value in inputs.items()}, "labels": 0} for i in range(len(TEXTS))]
    folder = tempfile.mkdtemp()

    def batches(size=2):
        arguments = TrainingArguments(folder, use_cpu=True, per_device_eval_batch_size=size, report_to=[])
        return Trainer(model, arguments).get_test_dataloader(rows)

    def predicted(net, x):
        prediction = db.predict(net, x, n_draws=N_DRAWS)
        return [prediction.mean["logits"], prediction.epistemic["logits"]]

    return Visit(
        model,
        ours=lambda: predicted(model, batches()),
        bare=lambda: predicted(copy.deepcopy(model), dict(inputs)),
        other_batches=lambda: predicted(model, batches(4)),
        own=lambda: list(batches()),
    )


def series():
    return np.sin(np.arange(60) / 3).astype(np.float32)


def darts(drop_prob):
    from darts import TimeSeries
    from darts.models import BlockRNNModel

    model = BlockRNNModel(
        input_chunk_length=12, output_chunk_length=4, hidden_dim=8, n_rnn_layers=2, dropout=drop_prob, n_epochs=1, random_state=0,
        model="LSTM", pl_trainer_kwargs={"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False},
    )  # fmt: skip
    model.fit(TimeSeries.from_values(series()), verbose=False)

    def ours():
        paths = guests.each_draw(model.model, lambda: model.predict(4, verbose=False), n_draws=N_DRAWS)
        return moments_of(torch.as_tensor(path.values()) for path in paths)

    def bare():
        given = inputs_of(model.model, lambda: model.predict(4, verbose=False))
        return moments_of(function_draws(model.model, given, output=lambda out: out.prediction[0, :, :, 0]))

    return Visit(model.model, ours, bare, own=repeated(lambda: model.predict(4, verbose=False)))


def neuralforecast(drop_prob):
    import pandas
    from neuralforecast import NeuralForecast
    from neuralforecast.models import LSTM

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    frame = pandas.DataFrame({"unique_id": "a", "ds": pandas.date_range("2020", periods=60), "y": series()})
    net = LSTM(
        h=4, input_size=12, encoder_n_layers=2, encoder_hidden_size=8, encoder_dropout=drop_prob, max_steps=2, recurrent=False,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, logger=False, scaler_type="identity",
    )  # fmt: skip
    forecast = NeuralForecast([net], freq="D")
    forecast.fit(frame, val_size=0)
    model = forecast.models[0]

    def ours():
        paths = guests.each_draw(model, lambda: forecast.predict()["LSTM"].to_numpy(), n_draws=N_DRAWS)
        return moments_of(torch.as_tensor(path) for path in paths)

    def bare():
        return moments_of(function_draws(model, inputs_of(model, forecast.predict), output=lambda out: out.flatten()))

    return Visit(model, ours, bare, own=repeated(forecast.predict))


def agent(drop_prob):
    from stable_baselines3 import DQN

    model = DQN("MlpPolicy", "CartPole-v1", seed=0, device="cpu", policy_kwargs={"net_arch": [16]})
    model.q_net.q_net.insert(2, nn.Dropout(drop_prob))
    observation = np.array([0.1, -0.2, 0.05, 0.3], dtype=np.float32)

    def ours():
        actions = guests.each_draw(
            model.q_net, lambda: model.predict(observation, deterministic=True)[0], n_draws=N_DRAWS
        )
        return [torch.tensor([int(action) for action in actions])]

    def bare():
        return [torch.cat(function_draws(model.q_net.q_net, torch.as_tensor(observation)[None])).argmax(1)]

    own = repeated(lambda: model.predict(observation, deterministic=True))
    return Visit(model.q_net, ours, bare, state=lambda: model.num_timesteps, own=own)


TUTORIALS = {
    "lightning": ("lightning", lightning_network),
    "lightning predict_step": ("lightning", lightning_step),
    "lightning Trainer.predict": ("lightning", lightning_trainer),
    "lightning Fabric": ("lightning", fabric),
    "accelerate": ("accelerate", accelerate),
    "torch.compile": ("torch", compiled),
    "torch.compile, called": ("torch", compiled_procedure),
    "DataParallel": ("torch", data_parallel),
    "skorch": ("skorch", skorch),
    "skorch predict": ("skorch", skorch_predict),
    "keras": ("keras", keras),
    "torch_geometric": ("torch_geometric", graphs),
    "chemprop": ("chemprop", molecules),
    "monai": ("monai", volumes),
    "transformers pipeline": ("transformers", pipeline),
    "transformers Trainer": ("accelerate", hugging_face_trainer),
    "darts": ("darts", darts),
    "neuralforecast": ("neuralforecast", neuralforecast),
    "stable_baselines3": ("stable_baselines3", agent),
}
"""By name: the package that a tutorial needs, and the tutorial."""

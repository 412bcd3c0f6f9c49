"""Every experiment end to end at its smallest size, and the parts whose arithmetic can be checked on its own."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import dropbayes as db
from dropbayes.experiments import (
    adversarial,
    bands,
    co2,
    convolution,
    datasets,
    descent,
    foraging,
    lenet,
    recurrent,
    reinforcement,
    rotation,
    solar,
    toy,
)
from dropbayes.experiments.__main__ import main
from dropbayes.experiments.record import Findings, Record, markdown_table
from dropbayes.experiments.reproduction import changed, reproduce


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    """The tests use what dependencies carry, so that they are the same everywhere."""
    monkeypatch.delenv("DROPBAYES_DATA", raising=False)


def tiny(name, module, tmp_path):
    findings = reproduce(name, settings=module.Settings.tiny(), out=tmp_path, device="cpu")
    folder = tmp_path / name
    report = json.loads((folder / "metrics.json").read_text())
    assert report["metrics"]
    assert findings.title in (folder / "page.md").read_text()
    for figure in findings.figures:
        assert (folder / f"{figure}.png").stat().st_size > 5000
    return report["metrics"]


# --- the findings ---------------------------------------------------------------------------------------------------


def test_co2_deviation_grows_beyond_the_data_for_relu_and_stays_bounded_for_tanh(tmp_path):
    metrics = tiny("co2", co2, tmp_path)
    growth = {k: metrics[k]["epistemic_last_third"] / metrics[k]["epistemic_observed"] for k in ("relu-5", "tanh-0.1")}
    assert growth["relu-5"] > 1.5
    assert growth["tanh-0.1"] < 1.3
    assert metrics["relu-5"]["log_likelihood"] > metrics["averaged weights"]["log_likelihood"]
    assert metrics["process"]["epistemic_last_third"] > 5 * metrics["process"]["epistemic_observed"]


def test_solar_network_is_over_confident_where_the_process_is_not(tmp_path):
    metrics = tiny("solar", solar, tmp_path)
    process, network = (next(m for k, m in metrics.items() if name in k) for name in ("process", "MC dropout"))
    assert network["coverage_95_without_noise_gaps"] < 0.75
    assert process["coverage_95_without_noise_gaps"] > network["coverage_95_without_noise_gaps"] + 0.1
    assert process["epistemic_gaps"] > 2 * process["epistemic_observed"]


def test_uncertainty_rises_as_digits_turn(tmp_path):
    metrics = tiny("rotation", rotation, tmp_path)
    for network in metrics.values():
        assert network["error_mc"] < 0.2
        for measure in rotation.MEASURES:
            assert max(network[measure][1:]) > 1.5 * network[measure][0]
        assert network["auroc_entropy"] > 0.7


def test_thompson_agents_earn_more_than_random_exploration(tmp_path):
    metrics = tiny("reinforcement", reinforcement, tmp_path)
    gap = metrics["thompson"]["final_reward"] - metrics["epsilon-greedy"]["final_reward"]
    error = math.hypot(*(metrics[policy]["final_reward_standard_error"] for policy in metrics))
    assert gap > 2 * error


def test_attacks_lower_accuracy_and_are_answered_by_uncertainty(tmp_path):
    metrics = tiny("adversarial", adversarial, tmp_path)
    for attack in ("FGSM", "PGD"):
        accuracy = metrics[attack]["accuracy_averaged"]
        assert accuracy[-1] < accuracy[0] - 0.2
        assert metrics[attack]["auroc_entropy"][1] > 0.5
    assert metrics["PGD"]["accuracy_averaged"][-1] <= metrics["FGSM"]["accuracy_averaged"][-1]
    assert metrics["random signs"]["accuracy_averaged"][-1] > metrics["FGSM"]["accuracy_averaged"][-1]


def test_one_mask_per_sequence_spreads_more_than_fresh_masks(tmp_path):
    metrics = tiny("recurrent", recurrent, tmp_path)
    assert metrics["variational"]["epistemic_test_ppm"] > metrics["naive"]["epistemic_test_ppm"]


def test_dropout_before_every_layer_helps_with_little_data(tmp_path):
    metrics = tiny("convolution", convolution, tmp_path)
    assert metrics["all, mc"]["0.1"]["overconfidence"] < metrics["none, averaged"]["0.1"]["overconfidence"]


def test_small_demonstrations(tmp_path):
    metrics = tiny("toy", toy, tmp_path)
    assert metrics["demo"]["epistemic_beyond"] > 1.5 * metrics["demo"]["epistemic_among_points"]
    # 1 / (2 N w / (p l^2)) with N = 20, w = 1e-5, p = 0.95, l^2 = 0.005, as the demonstration has it
    assert metrics["demo"]["precision"] == pytest.approx(0.95 * 0.005 / (2 * 20 * 1e-5), rel=1e-5)
    assert metrics["heteroscedastic"]["aleatoric_jumps"] > 1.5 * metrics["heteroscedastic"]["aleatoric_smooth"]
    first, last = metrics["concrete"]["mean_drop_prob"]
    assert last < first


# --- the descent of the deep networks -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("hidden_layers", [1, 2, 4])
def test_written_out_step_is_that_of_autograd_and_sgd(activation, hidden_layers):
    network = descent.Network(hidden_layers, 7, activation, 0.3, learning_rate=0.05, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(11, 1, dtype=torch.float64, generator=generator) for _ in range(2))
    net = descent.module(network).double()
    program = descent._Program(network, net, x, y)
    linear = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    groups = [
        {"params": [layer.weight for layer in linear], "lr": 0.05},
        {"params": [layer.bias for layer in linear], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    activate = torch.relu if activation == "relu" else torch.tanh
    for _ in range(3):
        program.draw_masks()
        masks = program.masks[0]
        h = x
        for layer, mask in zip(linear[:-1], masks, strict=True):
            h = activate(layer(h)) * mask
        loss = (linear[-1](h) - y).square().sum() / (2 * len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        program.step(masks, torch.tensor(0.05, dtype=torch.float64))
    other = descent.module(network).double()
    program.store(other)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_masks_keep_the_right_share_scaled_to_mean_one():
    network = descent.Network(2, 64, "relu", 0.2, learning_rate=0.01, weight_decay=0.0)
    program = descent._Program(network, descent.module(network), torch.zeros(100, 1), torch.zeros(100, 1))
    program.draw_masks()
    assert set(program.masks.unique().tolist()) == {0.0, 1.25}
    assert program.masks.mean().item() == pytest.approx(1.0, abs=5 * 0.5 / program.masks.numel() ** 0.5)


def test_learning_rate_follows_the_papers_policy():
    network = descent.Network(1, 4, "relu", 0.1, learning_rate=0.1, weight_decay=0.0, gamma=0.1, power=0.5)
    program = descent._Program(network, descent.module(network), torch.zeros(3, 1), torch.zeros(3, 1))
    rates = []
    program.step = lambda masks, rate: rates.append(rate.item())
    program.call()
    program.call()
    expected = [0.1 * (1 + 0.1 * i) ** -0.5 for i in range(2 * descent.STEPS_PER_CALL)]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_broken_descent_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(descent, "STEPS_PER_BLOCK", 20)
    monkeypatch.setattr(descent, "BLOCKS_PER_CHECKPOINT", 1)
    network = descent.Network(2, 8, "relu", 0.1, learning_rate=0.01, weight_decay=1e-6)
    x = torch.linspace(-1, 1, 30)[:, None]
    whole = descent.descend(network, x, x.sin(), n_steps=60)
    file = tmp_path / "state"
    descent.descend(network, x, x.sin(), n_steps=40, checkpoint=file)
    resumed = descent.descend(network, x, x.sin(), n_steps=60, checkpoint=file)
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_divergence_is_an_error():
    network = descent.Network(3, 16, "relu", 0.1, learning_rate=1e4, weight_decay=0.0)
    with pytest.raises(FloatingPointError, match="lower"):
        descent.descend(network, torch.ones(5, 1), torch.ones(5, 1), n_steps=100)


# --- the world --------------------------------------------------------------------------------------------------------


def one_world(*, items=(), poison=(), position=(50.0, 250.0), angle=0.0):
    """A world with the given items alone, the agent where it is said to be."""
    world = foraging.Worlds(1, openness_factor=1.0)
    world.present[:] = False
    for slot, (place, bad) in enumerate(zip(items, poison, strict=True)):
        world.items[0, slot] = torch.tensor(place)
        world.poison[0, slot], world.present[0, slot] = bad, True
    world.position[0] = torch.tensor(position)
    world.angle[0] = angle
    return world


def test_eyes_see_the_nearest_thing_on_their_ray():
    # Eye 3 looks along the heading, here +y. Food stands 40 ahead, poison 60 behind it on the same ray.
    world = one_world(items=[(50.0, 290.0), (50.0, 310.0)], poison=[False, True])
    view = world.view()
    assert view.kind[0, 3] == foraging.FOOD
    assert view.distance[0, 3].item() == pytest.approx(40.0)
    inputs = view.inputs()[0].view(9, 3)
    assert inputs[3].tolist() == pytest.approx([1.0, 40 / 85, 1.0])
    # Heading -x: the outer wall at x = 10 is 40 away.
    world = one_world(angle=-math.pi / 2)
    view = world.view()
    assert view.kind[0, 3] == foraging.WALL
    assert view.distance[0, 3].item() == pytest.approx(40.0, abs=1e-4)
    assert view.openness().item() < 1


def test_walls_hide_items():
    # The right side of the left room stands at x = 300.
    world = one_world(items=[(310.0, 250.0)], poison=[False], position=(280.0, 250.0), angle=math.pi / 2)
    assert world.view().kind[0, 3] == foraging.WALL
    far_side = one_world(items=[(310.0, 250.0)], poison=[False], position=(293.0, 250.0), angle=math.pi / 2)
    assert far_side._eat().item() == 0.0


def test_equal_wheels_go_straight_and_unequal_ones_turn():
    world = one_world()
    world.act(torch.tensor([0]), world.view())
    # The mean of two turns by 1 radian about wheels 5 to either side moves 5 sin 1 ahead.
    assert world.position[0].tolist() == pytest.approx([50.0, 250.0 + 5 * math.sin(1)], abs=1e-4)
    assert world.angle.item() == pytest.approx(0.0)
    world = one_world(angle=1.0)
    world.act(torch.tensor([1]), world.view())
    assert world.angle.item() == pytest.approx(1.2)


def test_a_step_across_a_wall_is_undone_but_not_its_turn():
    world = one_world(position=(12.0, 250.0), angle=-math.pi / 2)
    world.act(torch.tensor([1]), world.view())
    assert world.position[0].tolist() == pytest.approx([12.0, 250.0])
    assert world.angle.item() == pytest.approx(2 * math.pi - math.pi / 2 + 0.2, abs=1e-5)


@pytest.mark.parametrize(("bad", "worth"), [(False, 5.0), (True, -6.0)])
def test_rewards_are_openness_and_bonus_and_what_was_eaten(bad, worth):
    world = one_world(items=[(50.0, 262.0)], poison=[bad])
    view = world.view()
    openness = view.openness().item()
    reward = world.act(torch.tensor([0]), view).item()
    bonus = 0.1 * openness if openness > 0.75 else 0.0
    assert reward == pytest.approx(openness + bonus + worth, abs=1e-5)
    assert not world.present[0, 0]


def test_doubled_openness_is_at_most_one():
    reward = []
    for factor in (1.0, 2.0):
        world = one_world(angle=-math.pi / 2)  # before a wall
        world.openness_factor = factor
        view = world.view()
        reward.append(world.act(torch.tensor([3]), view).item())
    assert reward[1] == pytest.approx(min(1.0, 2 * reward[0]))


def test_worlds_together_are_worlds_alone():
    together = foraging.Worlds(3, seed=1)
    alone = []
    for k in range(3):
        world = foraging.Worlds(1)
        for name in ("position", "angle", "items", "poison", "present", "born"):
            setattr(world, name, getattr(together, name)[k : k + 1].clone())
        alone.append(world)
    for step in range(8):
        actions = torch.tensor([step % 5, (step + 1) % 5, 0])
        reward = together.act(actions, together.view())
        singly = torch.cat([w.act(actions[k : k + 1], w.view()) for k, w in enumerate(alone)])
        torch.testing.assert_close(reward, singly)


def test_the_environment_passes_gymnasiums_checker():
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    from dropbayes.experiments.environment import Foraging

    checker.check_env(Foraging(max_steps=50), skip_render_check=True)
    with pytest.raises(ValueError, match="action"):
        Foraging().step(9)


# --- the agents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_agents", [3, 9])  # few and many take their products in different ways
def test_learning_step_is_that_of_autograd(n_agents):
    settings = reinforcement.Settings(batch_size=16, learning_starts=0, learning_rate=0.1, weight_decay=0.5, replay=40)
    agents = reinforcement.Agents(n_agents, "thompson", settings)
    for name in ("weights", "biases"):
        setattr(agents, name, [value.double() for value in getattr(agents, name)])
    states, upstream = torch.randn(n_agents, 16, 27).double(), torch.randn(n_agents, 16, 5).double()
    masks = [mask.double() for mask in agents.masks(16)]
    parameters = [value.clone().requires_grad_() for value in (*agents.weights, *agents.biases)]
    h = states
    for layer in range(3):
        h = (h * masks[layer]) @ parameters[layer] + parameters[3 + layer]
        h = h.relu() if layer < 2 else h
    values, inputs = agents.values(states, masks)
    torch.testing.assert_close(values, h.detach())
    penalty = sum(value.square().sum() for value in parameters[:3])
    loss = ((h * upstream).sum() + 0.5 * settings.weight_decay * penalty) / settings.batch_size
    gradients = torch.autograd.grad(loss, parameters)
    agents._descend(upstream, inputs, scale=1 / 0.9)
    for value, before, gradient in zip((*agents.weights, *agents.biases), parameters, gradients, strict=True):
        torch.testing.assert_close(value, before.detach() - settings.learning_rate * gradient, rtol=1e-6, atol=1e-8)


def test_experience_is_state_action_reward_and_the_state_after():
    settings = reinforcement.Settings(replay=5)
    agents = reinforcement.Agents(2, "epsilon-greedy", settings)
    states = [torch.full((2, 27), float(k)) for k in range(3)]
    for k, state in enumerate(states):
        agents.remember(state, torch.full((2,), float(k)), torch.full((2,), 10.0 + k))
    assert agents.stored == 2
    row = agents.memory.view(2, 5, -1)[1, 1]
    assert row[0] == 1 and row[27] == 2 and row[54] == 1 and row[55] == 11


def test_only_thompson_agents_drop_units():
    settings = reinforcement.Settings()
    assert reinforcement.Agents(2, "epsilon-greedy", settings).masks(4) is None
    masks = reinforcement.Agents(50, "thompson", settings).masks(64)
    assert [tuple(m.shape) for m in masks] == [(50, 64, 27), (50, 64, 50), (50, 64, 50)]
    dropped = torch.cat([m.flatten() for m in masks]).eq(0).double()
    assert dropped.mean().item() == pytest.approx(0.1, abs=5 * (0.09 / dropped.numel()) ** 0.5)


def test_epsilon_follows_the_papers_formula():
    settings = reinforcement.Settings()
    assert reinforcement.epsilon(0, settings) == 1.0
    assert reinforcement.epsilon(200_000, settings) == 0.05
    assert reinforcement.epsilon(52_250, settings) == pytest.approx(0.75)


def test_a_broken_simulation_goes_on_to_the_same_rewards(tmp_path):
    settings = replace(reinforcement.Settings.tiny(), n_seeds=2, n_steps=600)
    file = tmp_path / "state"
    whole = reinforcement.simulate("thompson", settings)
    stopped = reinforcement.Agents(2, "thompson", settings)
    worlds = foraging.Worlds(2)
    curve = []
    for _ in range(2):
        curve.append(sum(reinforcement.tick(worlds, stopped) for _ in range(reinforcement.BLOCK)) / reinforcement.BLOCK)
    reinforcement._save(worlds, stopped, file, repr(("thompson", settings)), curve)
    resumed = reinforcement.simulate("thompson", settings, checkpoint=file)
    np.testing.assert_allclose(resumed, whole, rtol=1e-5)


def test_passing_step_counts_from_the_end_of_the_random_phase():
    rewards = np.zeros((2, 40))
    rewards[0, :5] = 9.0  # luck in the random phase does not count
    rewards[1, 30:] = 2.0
    settings = reinforcement.Settings(random_steps=2000)
    passed = reinforcement.passing_step(rewards, settings)
    assert np.isnan(passed[0])
    assert passed[1] == 33 * 200  # the third block of reward 2 brings the mean of five to 1.2


# --- pictures, data, records ------------------------------------------------------------------------------------------


def test_turning_by_a_right_angle_is_rot90():
    image = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        rotation.turned(image, torch.tensor([90.0]))[0], image.rot90(1, (1, 2)), atol=1e-4, rtol=0
    )


def test_attacks_stay_within_their_strength_and_raise_the_loss():
    net = lenet.lenet("all", channels=(2, 3), hidden=8).eval()
    x, y = torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    before = torch.nn.functional.cross_entropy(net(x), y)
    for attack in (adversarial.fgsm, adversarial.pgd):
        moved = attack(net, x, y, strength=0.05)
        assert (moved - x).abs().max() <= 0.05 + 1e-6
        assert moved.min() >= 0 and moved.max() <= 1
        assert torch.nn.functional.cross_entropy(net(moved), y) > before


def test_lenet_has_its_sites_where_it_says():
    x = torch.rand(2, 1, 28, 28)
    for sites, n_sites in (("last", 1), ("all", 3)):
        assert len(db.sites(lenet.lenet(sites, channels=(2, 3), hidden=8), x)) == n_sites


def test_co2_is_detrended_and_standardised_on_the_observed_months():
    data = datasets.atmospheric_co2()
    assert len(data.y) == 272 and len(data.y_hidden) == 156
    assert data.x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.y.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert (data.x * data.y).mean().item() == pytest.approx(0, abs=1e-5)  # no linear trend is left
    assert data.x_hidden.min() > data.x.max()


def test_solar_hides_five_segments_of_twenty():
    data = datasets.solar_irradiance()
    assert len(data.y) + len(data.y_hidden) == 309
    assert len(solar._segments(data)) == len([s for s in datasets.SOLAR_SEGMENTS if s[0] < 309])


def test_missing_data_says_what_to_do(monkeypatch, tmp_path):
    def offline(*args, **kwargs):
        raise TimeoutError

    monkeypatch.setenv("DROPBAYES_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(datasets.urllib.request, "urlopen", offline)
    with pytest.raises(FileNotFoundError, match="DROPBAYES_DATA"):
        datasets.digits("mnist")
    with pytest.raises(ValueError, match="kind"):
        datasets.digits("letters")


def test_windows_end_where_their_targets_begin():
    series = np.cumsum(np.r_[np.zeros(12), np.arange(60.0)])
    data = recurrent.windows(series, 24, 3)
    np.testing.assert_allclose(data.y[5] * recurrent.PPM, series[29:32] - series[28], rtol=1e-5)
    np.testing.assert_allclose(data.x[5, :, 0] * recurrent.PPM, series[5:29] - series[28], rtol=1e-5)
    np.testing.assert_allclose(data.last_year[20] * recurrent.PPM, series[32:35] - series[31], rtol=1e-5)


def test_gaussian_scores_are_those_of_torch_distributions():
    mean, std, y = np.array([0.0, 1.0]), np.array([0.5, 2.0]), np.array([0.3, -4.0])
    total = torch.distributions.Normal(torch.tensor(mean), torch.tensor(np.sqrt(std**2 + 0.25)))
    scores = bands.gaussian_scores(mean, std, y, precision=4.0)
    assert scores["log_likelihood"] == pytest.approx(total.log_prob(torch.tensor(y)).mean().item())
    assert scores["coverage_95"] == 0.5


def test_a_stage_is_computed_once_for_its_key(tmp_path):
    calls = []

    def compute():
        calls.append(1)
        return {"a": np.arange(3)}

    record = Record(tmp_path, {"size": 1})
    record.stage("one", compute)
    np.testing.assert_array_equal(record.stage("one", compute)["a"], np.arange(3))
    assert len(calls) == 1
    Record(tmp_path, {"size": 2}).stage("one", compute)
    assert len(calls) == 2
    with pytest.raises(FileNotFoundError, match="figures-only"):
        Record(tmp_path, {"size": 3}, saved_only=True).stage("one", compute)


def test_other_settings_have_another_checkpoint(tmp_path):
    one, other = (Record(tmp_path, {"size": size}).checkpoint("net") for size in (1, 2))
    assert one != other
    assert one == Record(tmp_path, {"size": 1}).checkpoint("net")


def test_the_page_states_findings_and_command(tmp_path):
    table = markdown_table([{"a": 1, "b": 0.123456}])
    findings = Findings("A title", ["It is so."], {"x": float("nan"), "y": np.float32(1.5)}, {"Numbers": table})
    Record(tmp_path, co2.Settings.tiny()).write(findings, command="the command")
    page = (tmp_path / "page.md").read_text()
    assert "# A title" in page and "| 1 | 0.1235 |" in page and "the command" in page
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["metrics"] == {"x": None, "y": 1.5}
    assert report["settings"]["width"] == 32


def test_the_command_line_sets_settings_and_draws_again_from_saved_stages(tmp_path, capsys):
    options = ["--set", "width=8", "--set", "n_steps=20", "--set", "n_draws=5", "--set", 'networks=["relu-5"]']
    assert main(["co2", "--quick", "--out", str(tmp_path), "--device", "cpu", *options]) == 0
    (tmp_path / "co2" / "co2.png").unlink()
    assert main(["co2", "--quick", "--out", str(tmp_path), "--device", "cpu", "--figures-only", *options]) == 0
    assert (tmp_path / "co2" / "co2.png").exists()
    assert "Extrapolation" in capsys.readouterr().out
    with pytest.raises(ValueError, match="n_steps"):
        changed(co2.Settings(), ["steps=1"])
    with pytest.raises(ValueError, match="co2"):
        reproduce("sunshine")


@pytest.mark.parametrize("module", [co2, solar, rotation, reinforcement, adversarial, recurrent, convolution, toy])
def test_settings_are_frozen_and_come_in_three_sizes(module):
    full, quick, small = module.Settings(), module.Settings.quick(), module.Settings.tiny()
    assert full != quick != small
    with pytest.raises(AttributeError):
        full.seed = 1

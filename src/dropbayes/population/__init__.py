r"""Many dropout networks trained, sampled and scored as one tensor program.

One network of 50 units leaves a processor idle between its small products; a thousand of them, with stacked parameters
`[member, in, out]`, keep it busy. All members share an architecture and a batch size; everything else is per
member: its data, the drop probability of each layer, its weight decay (or the precision τ that implies it), its
learning rate, its number of epochs, its seed. A typical search over splits and candidates, scored, its noise re-fitted:

    tasks = [Task(x[fit], y[fit], held_out=(x[hold], y[hold])) for fit, hold in splits]
    members = [Member(task=s, drop_prob=p, precision=tau, epochs=400) for s in range(len(splits)) for p, tau in grid]
    trained = train(tasks, members, hidden=(50,), batch_size=128, device="auto")
    trained = fit_precision(trained, [task.held_out for task in tasks])  # τ by line search, no retraining
    scores = evaluate(trained, [task.held_out for task in tasks], n_draws=1000)
    scores.log_likelihood, scores.rmse                    # one value per member, in the units of y
    choose_ensemble(x, y, [Member(drop_prob=p) for p in (0.05, 0.1)])  # all of it, on folds of the rows

**Randomness.** A member's initial weights, its batches and its masks are a function of its own seed and of the step,
not of its neighbours: it equals the network trained alone (up to rounding), on any device. This costs almost nothing
because the members share one stream of random words: the mask of member b drops the unit whose word
$w_t[i, k] \oplus r_b[k]$ is below a threshold, with $w_t$ fresh and uniform at every step t, row i and unit k, and
$r_b$ fixed by the member's seed. Whatever $r_b$ is, the result is uniform and independent over steps, rows and units.
The order of rows is a fixed shuffle of the member's own composed with a fresh one per epoch, which is uniform by the
same argument.
"""

from dropbayes.population.ensembles import EnsembleChoice, choose_ensemble
from dropbayes.population.evaluation import Evaluation, draws, evaluate, fit_precision
from dropbayes.population.fitting import train, train_in_jobs
from dropbayes.population.records import Member, Population, Task, network, select

__all__ = [
    "EnsembleChoice",
    "Evaluation",
    "Member",
    "Population",
    "Task",
    "choose_ensemble",
    "draws",
    "evaluate",
    "fit_precision",
    "network",
    "select",
    "train",
    "train_in_jobs",
]

/** What is on the screen as Python: the same points, weights, masks and prediction. */

/** @typedef {import("./network.js").Network} Network */
/** @typedef {import("./scenes.js").Point} Point */

/**
 * @typedef {object} Shown
 * @property {Network} network
 * @property {Point[]} points
 * @property {number} dropProb
 * @property {number} precision
 * @property {number} lengthScale
 * @property {number} nDraws
 * @property {number} seed
 * @property {number} draw
 * @property {ArrayLike<number>} grid
 */

const LINE = 100;

/**
 * A program that makes the prediction on the screen.
 * @param {Shown} shown
 */
export function pythonCode(shown) {
  const { network, points, dropProb, precision, lengthScale, nDraws, seed, draw, grid } = shown;
  const activation = network.activation === "relu" ? "nn.ReLU" : "nn.Tanh";
  const data = points.map(({ x, y }) => `(${x}, ${y})`).join(", ");
  return `"""What the page of dropbayes shows: a trained dropout network, its draws and their mean and deviation."""

import base64

import matplotlib.pyplot as plt
import torch
from torch import nn

import dropbayes as db

POINTS = [
${wrapLines(data, " ")}
]
WEIGHTS = """
${wrapLines(base64(network), "")}
"""
x, y = torch.tensor(POINTS, dtype=torch.float64).reshape(-1, 2)[:, :, None].unbind(1)


def network(widths, drop_prob):
    layers = []
    for n_in, n_out in zip(widths, widths[1:]):
        layers += [nn.Linear(n_in, n_out), ${activation}(), nn.Dropout(drop_prob)]
    return nn.Sequential(*layers[:-2]).double()


net = network([${network.widths.join(", ")}], drop_prob=${dropProb})
likelihood = db.Gaussian(precision=${precision})

# The weights on the screen. To train anew instead:
# db.fit(net, x, y, likelihood=likelihood, epochs=3000, learning_rate=0.01,
#        prior=db.Prior(length_scale=${lengthScale}, following_length_scale="fan_in"))
numbers = torch.frombuffer(bytearray(base64.b64decode(WEIGHTS)), dtype=torch.float32)
nn.utils.vector_to_parameters(numbers.double(), net.parameters())

grid = torch.linspace(${grid[0]}, ${grid[grid.length - 1]}, ${grid.length}, dtype=torch.float64)[:, None]
prediction = db.predict(net, grid, n_draws=${nDraws}, seed=${seed}, likelihood=likelihood, keep_draws=True)
mean, std, epistemic = (z[:, 0] for z in (prediction.mean, prediction.std, prediction.epistemic.sqrt()))

for k in (1, 2):
    plt.fill_between(grid[:, 0], mean - k * std, mean + k * std, color="C0", alpha=0.12, lw=0)
    plt.fill_between(grid[:, 0], mean - k * epistemic, mean + k * epistemic, color="C0", alpha=0.2, lw=0)
plt.plot(grid, prediction.draws[${draw}], color="C1", lw=1, label="draw ${draw} of seed ${seed}")
plt.plot(grid, mean, color="C0", label="mean of ${nDraws} draws")
plt.plot(x, y, "k.", label="points")
plt.legend()
plt.show()
`;
}

/**
 * All parameters in the order of torch's, as little-endian float32 in base64.
 * @param {Network} network
 */
function base64({ weights, biases }) {
  const values = weights.flatMap((weight, at) => [...weight, ...biases[at]]);
  const view = new DataView(new ArrayBuffer(4 * values.length));
  values.forEach((value, k) => view.setFloat32(4 * k, value, true));
  let text = "";
  for (let k = 0; k < view.byteLength; k += 1) text += String.fromCharCode(view.getUint8(k));
  return btoa(text);
}

/**
 * Text in lines of at most 100 characters, cut at a separator (anywhere if it is empty).
 * @param {string} text @param {string} separator
 */
function wrapLines(text, separator) {
  if (separator === "") return (text.match(new RegExp(`.{1,${LINE}}`, "g")) ?? []).join("\n");
  const lines = [""];
  for (const part of text.split(`),${separator}`)) {
    const piece = part.endsWith(")") || part === "" ? part : `${part}),`;
    if (lines[lines.length - 1].length + piece.length > LINE - 4) lines.push("");
    lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + piece;
  }
  return lines.map((one) => `    ${one}`).join("\n");
}

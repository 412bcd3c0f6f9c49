/** Ready-made scenes: points in the network's units, how to label them, and settings that suit them. */
import { uniforms } from "./masks.js";

/** @typedef {{x: number, y: number}} Point */
/** How to print a coordinate: offset + scale * value. @typedef {{label: string, offset: number, scale: number}} Unit */
/** @typedef {import("./state.js").Settings} Settings */

/**
 * @typedef {object} Scene
 * @property {string} title
 * @property {string} note what to look for
 * @property {Point[]} points
 * @property {[number, number]} xRange
 * @property {[number, number]} yRange
 * @property {Unit} x
 * @property {Unit} y
 * @property {Partial<Settings>} settings
 */

/** @type {Unit} */
const PLAIN_X = { label: "x", offset: 0, scale: 1 };
/** @type {Unit} */
const PLAIN_Y = { label: "y", offset: 0, scale: 1 };

/** Coordinates are kept to a thousandth, so that a shared address holds them exactly. @param {number} value */
export function roundCoordinate(value) {
  return Math.round(value * 1000) / 1000;
}

/**
 * Points y = f(x) with noise whose deviation may depend on x.
 * @param {number[]} xs @param {(x: number) => number} f @param {(x: number) => number} deviation @param {number} seed
 * @returns {Point[]}
 */
function noisyPoints(xs, f, deviation, seed) {
  const chance = uniforms(seed, 0);
  return xs.map((x) => {
    const normal = Math.sqrt(-2 * Math.log(chance())) * Math.cos(2 * Math.PI * chance());
    return { x: roundCoordinate(x), y: roundCoordinate(f(x) + deviation(x) * normal) };
  });
}

/** @param {number} from @param {number} to @param {number} count */
function evenlySpaced(from, to, count) {
  return Array.from({ length: count }, (_, k) => from + ((to - from) * k) / (count - 1));
}

/**
 * CO2 at Mauna Loa, ppm above 315, monthly from January 1959 to December 1962: Keeling and Whorf (CDIAC, 2004), rounded.
 */
const CO2 = [
  0.6, 1.5, 1.6, 2.7, 3.3, 3.2, 1.6, -0.2, -1.2, -1.7, -0.2, 0.6, 1.4, 2.0, 2.6, 4.0, 5.0, 4.6, 3.2, 0.9, -0.8, -1.2, 0.0, 1.2,
  1.9, 2.7, 3.5, 4.5, 5.6, 4.8, 3.6, 1.8, 0.0, 0.3, 1.1, 2.0, 2.9, 3.6, 4.7, 5.6, 6.0, 5.6, 4.6, 2.4, 1.3, 0.4, 1.7, 2.7,
];

/**
 * The same series, 1958 to 1981, less its trend and standardised as in the paper: means of 12 of its 272 training
 * points each, rounded (yaringal/DropoutUncertaintyCaffeModels, co2_regression).
 */
const FIGURE_2 = [
  0.76, 0.51, 0.4, 0.31, 0.12, -0.02, -0.37, -0.32, -0.39, -0.49, -0.38, -0.27, -0.39, -0.52, -0.1, 0.02, -0.19, -0.19, -0.12,
  0.27, 0.4, 0.69,
];

/**
 * Reconstructed solar irradiance with the paper's five missing segments: means of five of its training points each,
 * standardised and rounded (yaringal/DropoutUncertaintyCaffeModels, solar_regression). Runs of [first x, values],
 * 0.0462 apart.
 * @type {[number, number[]][]}
 */
const SOLAR = [
  [-1.71, [0.3, -0.32, -0.6]],
  [-1.37, [-1.47, -1.47, -1.47, -1.47, -1.47, -1.47, -1.47, -1.47, -1.47, -1.47, -1.38]],
  [-0.67, [-0.36, -0.42, -0.15, 0.53, 0.09, 0.16, 0.05, 0.59, 0.36, 0.69, 0.42]],
  [0.02, [-1.02, -0.97, -0.81, -0.62, 0.07, 0.38, 0.85, 0.44, 0.63, 0.22, 0.55]],
  [0.71, [-0.09, -0.15, 0.32, -0.05, -0.07, -0.07, 0.18, 0.63, 0.32, 0.44, 0.61]],
  [1.4, [2.11, 1.33, 1.37, 1.08, 2.11, 1.68, 2.31]],
];

/** @type {Record<string, Scene>} */
export const SCENES = {
  gap: {
    title: "A gap",
    note: "No points in the middle, none outside. A person would be unsure in both places. Is the network? Add a point in the gap and watch; then switch on the Gaussian process.",
    points: noisyPoints([...evenlySpaced(-2, -0.75, 12), ...evenlySpaced(0.75, 2, 12)], (x) => Math.sin(2 * x), () => 0.05, 1),
    xRange: [-3.5, 3.5],
    yRange: [-2.6, 2.6],
    x: PLAIN_X,
    y: PLAIN_Y,
    settings: { draws: true },
  },
  clusters: {
    title: "Two clusters",
    note: "With one hidden layer the doubt between two clusters can never exceed the larger doubt at their edges (Foong and others 2020). Raise the depth to 2 or 3 and it may, a little.",
    points: [
      ...noisyPoints(evenlySpaced(-1.7, -1.1, 10), () => -0.6, () => 0.12, 2),
      ...noisyPoints(evenlySpaced(1.1, 1.7, 10), () => 0.6, () => 0.12, 3),
    ],
    xRange: [-3.5, 3.5],
    yRange: [-2.6, 2.6],
    x: PLAIN_X,
    y: PLAIN_Y,
    settings: { depth: 1, process: true },
  },
  step: {
    title: "A step",
    note: "Where exactly does it jump? The points do not say, yet these draws are surest right there: dropping TanH units mostly stretches and shrinks the curve, and in the middle of the jump there is nothing to stretch. Choose ReLU and depth 3, and the band widens at the jump.",
    points: noisyPoints(evenlySpaced(-2, 2, 24), (x) => (x < 0 ? -0.8 : 0.8), () => 0.04, 4),
    xRange: [-3.5, 3.5],
    yRange: [-2.6, 2.6],
    x: PLAIN_X,
    y: PLAIN_Y,
    settings: { activation: "tanh", lengthScale: 0.3 },
  },
  noise: {
    title: "Noise that grows",
    note: "One noise level τ for all x: too wide on the left, too narrow on the right. The epistemic band hardly notices, for more points would not help here.",
    points: noisyPoints(evenlySpaced(-2, 2, 60), (x) => 0.5 * x, (x) => 0.03 + 0.18 * (x + 2), 5),
    xRange: [-3.5, 3.5],
    yRange: [-3.2, 3.2],
    x: PLAIN_X,
    y: PLAIN_Y,
    settings: { learnPrecision: true, precision: 10, lengthScale: 1 },
  },
  co2: {
    title: "CO₂",
    note: "Carbon dioxide at Mauna Loa, 1959 to 1962, month by month. The seasons are learned, but not that they go on: beyond the data the draws fan out.",
    points: CO2.map((ppm, month) => ({ x: roundCoordinate(-2 + (month + 0.5) / 12), y: roundCoordinate((ppm - 2) / 2) })),
    xRange: [-2.6, 4],
    yRange: [-4, 5],
    x: { label: "year", offset: 1961, scale: 1 },
    y: { label: "CO₂ in ppm", offset: 317, scale: 2 },
    settings: { lengthScale: 0.1, precision: 400, depth: 3, width: 64, dropProb: 0.02 },
  },
  solar: {
    title: "Solar gaps",
    note: "Solar irradiance, reconstructed from 1610 on, with five segments taken out as in the paper. The doubt in the gaps is less than it should be: in the paper's experiment, repeated in full, the draws' own 95 % band held 58 % of the missing values.",
    points: SOLAR.flatMap(([first, values]) => values.map((y, k) => ({ x: roundCoordinate(1.2 * (first + 0.0462 * k)), y }))),
    xRange: [-2.7, 2.7],
    yRange: [-3.2, 4],
    x: { label: "time, standardised", offset: 0, scale: 1 / 1.2 },
    y: { label: "irradiance, standardised", offset: 0, scale: 1 },
    settings: { lengthScale: 0.15, precision: 400, width: 64, dropProb: 0.02 },
  },
  figure2: {
    title: "Figure 2",
    note: "The paper's figure 2 in small: CO₂ less its trend, yearly means, asked far to the right of the data. The standard prediction goes on as if it knew; draws of ReLU networks spread; choose TanH and they do not; the squared-exponential process returns to its prior.",
    points: FIGURE_2.map((y, k) => ({ x: roundCoordinate(-1.66 + 0.1528 * k), y })),
    xRange: [-2.2, 4],
    yRange: [-3.2, 3.6],
    x: { label: "time, standardised", offset: 0, scale: 1 },
    y: { label: "CO₂ less its trend, standardised", offset: 0, scale: 1 },
    settings: { depth: 4, lengthScale: 0.5, dropProb: 0.1, standard: true, process: true, covariance: "cosine" },
  },
};

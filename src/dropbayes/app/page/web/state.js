/** The state of the page, and its form in the address: what is shared is what is seen. */

/** @typedef {import("./network.js").Activation} Activation */
/** @typedef {import("./scenes.js").Point} Point */

/**
 * @typedef {object} Settings
 * @property {number} dropProb
 * @property {number} precision tau
 * @property {boolean} learnPrecision
 * @property {number} lengthScale l
 * @property {number} width
 * @property {number} depth
 * @property {Activation} activation
 * @property {number} nDraws
 * @property {number} seed
 * @property {boolean} total whether the total band is shown
 * @property {boolean} epistemic whether the epistemic band is shown
 * @property {boolean} mean
 * @property {boolean} draws
 * @property {boolean} oneDraw
 * @property {number} draw the index of the single draw
 * @property {boolean} standard
 * @property {boolean} process
 * @property {"network" | "erf" | "cosine"} covariance of the process
 */

/** @typedef {{tab: string, scene: string, points: Point[] | null, settings: Settings}} State */

/** @type {Settings} */
export const DEFAULTS = {
  dropProb: 0.05,
  precision: 100,
  learnPrecision: false,
  lengthScale: 0.5,
  width: 50,
  depth: 2,
  activation: "relu",
  nDraws: 100,
  seed: 3,
  total: true,
  epistemic: true,
  mean: true,
  draws: false,
  oneDraw: false,
  draw: 7,
  standard: false,
  process: false,
  covariance: "network",
};

/** Least and greatest value of every number. @type {Record<string, [number, number]>} */
export const RANGES = {
  dropProb: [0.005, 0.6],
  precision: [1, 2000],
  lengthScale: [0.05, 5],
  width: [4, 128],
  depth: [1, 4],
  nDraws: [2, 300],
  seed: [0, 2 ** 31 - 1],
  draw: [0, 299],
};
const WHOLE = new Set(["width", "depth", "nDraws", "seed", "draw"]);
/** @type {Record<string, string[]>} */
const CHOICES = { activation: ["relu", "tanh"], covariance: ["network", "erf", "cosine"] };
export const TABS = ["points", "world", "digit"];
export const MOST_POINTS = 200;
const LARGEST_COORDINATE = 20;
const SETTING_NAMES = /** @type {(keyof Settings)[]} */ (Object.keys(DEFAULTS));

/**
 * A value of a setting from text; undefined where the text is none.
 * @param {keyof Settings} name @param {string} text
 */
export function settingOfText(name, text) {
  if (typeof DEFAULTS[name] === "boolean") return text === "1" ? true : text === "0" ? false : undefined;
  if (name in CHOICES) return CHOICES[name].includes(text) ? text : undefined;
  const value = Number(text);
  if (text.trim() === "" || !Number.isFinite(value)) return undefined;
  const [least, greatest] = RANGES[name];
  const inside = Math.min(greatest, Math.max(least, value));
  return WHOLE.has(name) ? Math.round(inside) : inside;
}

/**
 * The part of an address after #; settings and points that the scene has anyway are left out.
 * @param {State} state @param {Settings} usual the settings of the scene
 */
export function stateFragment(state, usual) {
  const parts = new URLSearchParams({ tab: state.tab, scene: state.scene });
  for (const name of SETTING_NAMES) {
    const value = state.settings[name];
    if (value !== usual[name]) parts.set(name, typeof value === "boolean" ? (value ? "1" : "0") : String(value));
  }
  if (state.points !== null) parts.set("points", state.points.map(({ x, y }) => `${Math.round(x * 1000)}_${Math.round(y * 1000)}`).join("."));
  return parts.toString();
}

/**
 * The state of an address; whatever it does not say or says wrongly is as usual.
 * @param {string} text what follows # @param {(scene: string) => Settings | null} usual the settings of a scene
 * @param {string} firstScene
 * @returns {State}
 */
export function stateOfFragment(text, usual, firstScene) {
  const parts = new URLSearchParams(text);
  const tab = parts.get("tab") ?? "";
  const named = parts.get("scene") ?? "";
  const scene = usual(named) ? named : firstScene;
  const settings = { .../** @type {Settings} */ (usual(scene)) };
  for (const name of SETTING_NAMES) {
    const value = parts.has(name) ? settingOfText(name, parts.get(name) ?? "") : undefined;
    if (value !== undefined) Object.assign(settings, { [name]: value });
  }
  return { tab: TABS.includes(tab) ? tab : TABS[0], scene, points: pointsOfText(parts.get("points")), settings };
}

/**
 * @param {string | null} text
 * @returns {Point[] | null}
 */
function pointsOfText(text) {
  if (text === null) return null;
  const points = text.split(".").filter(Boolean).slice(0, MOST_POINTS).map((pair) => {
    const [x, y] = pair.split("_").map((value) => Number(value) / 1000);
    return { x, y };
  });
  return points.filter(({ x, y }) => Math.abs(x) <= LARGEST_COORDINATE && Math.abs(y) <= LARGEST_COORDINATE);
}

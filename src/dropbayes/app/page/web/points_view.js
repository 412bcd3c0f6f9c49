/** The view of points: the plot that is drawn on, its controls, and the worker that trains. */
import { byId, copyText, speak } from "./document.js";
import { shortNumber } from "./plot.js";
import { PointEditor } from "./point_editor.js";
import { PointsPicture } from "./points_picture.js";
import { pythonCode } from "./python_code.js";
import { SCENES } from "./scenes.js";
import { DEFAULTS, stateFragment, settingOfText, RANGES } from "./state.js";
import { taskRunner } from "./worker.js";

/** @typedef {import("./scenes.js").Point} Point */
/** @typedef {import("./state.js").Settings} Settings */
/** @typedef {import("./state.js").State} State */
/** @typedef {import("./points_picture.js").Band} Band */
/** @typedef {import("./points_picture.js").Process} Process */

const TWEEN = 120; // milliseconds in which a new band takes the place of the old one
const FIRST_DRAWS = 10;
const CALM_FRAME = 600; // milliseconds between bands where motion is to be reduced

/** What each slider shows: a position from 0 to 100 for a number, on a logarithmic scale where `isLog`. */
const SLIDERS = /** @type {const} */ ({
  dropProb: { isLog: true, shown: (/** @type {number} */ v) => shortNumber(v) },
  precision: { isLog: true, shown: (/** @type {number} */ v) => shortNumber(v) },
  lengthScale: { isLog: true, shown: (/** @type {number} */ v) => shortNumber(v) },
  width: { isLog: false, shown: String },
  depth: { isLog: false, shown: String },
  nDraws: { isLog: false, shown: String },
});
const TOGGLES = /** @type {const} */ (["total", "epistemic", "mean", "draws", "oneDraw", "standard", "process", "learnPrecision"]);
const CHOICES = /** @type {const} */ (["activation", "covariance"]);
const NUMBERS = /** @type {const} */ (["seed", "draw"]);

/**
 * The settings of a scene, or null if there is none of that name.
 * @param {string} name
 */
export function sceneSettings(name) {
  return Object.hasOwn(SCENES, name) ? { ...DEFAULTS, ...SCENES[name].settings } : null;
}

/** The tab in which points are drawn. */
export class PointsView {
  /** @param {State} state @param {() => Worker} startWorker @param {() => void} changed tells that the state differs */
  constructor(state, startWorker, changed) {
    this.state = state;
    this.changed = changed;
    this.worker = startWorker();
    this.worker.addEventListener("message", ({ data }) => (data.task === "band" ? this.showBand(data) : this.showProcess(data)));
    this.picture = new PointsPicture();
    /** @type {Band | null} */
    this.band = null;
    /** @type {Band | null} */
    this.before = null;
    this.bandTime = 0;
    /** @type {Process | null} */
    this.process = null;
    this.isRunning = true;
    this.isVisible = true;
    this.restarts = 0;
    this.isSent = true;
    this.frame = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.buildScenes();
    this.bindControls();
    this.editor = new PointEditor(this.picture.plot.canvas, this);
    new ResizeObserver(() => this.redraw()).observe(this.picture.plot.canvas);
    this.showControls();
  }

  get scene() {
    return SCENES[this.state.scene];
  }

  get points() {
    return this.state.points ?? this.scene.points;
  }

  /** @param {Point[]} points */
  setPoints(points) {
    this.state.points = points;
    this.update();
  }

  /** After a change of points or settings: the worker is told once in a frame. */
  update() {
    this.changed();
    this.redraw();
    if (!this.isSent) return;
    this.isSent = false;
    requestAnimationFrame(() => this.send());
  }

  send() {
    this.isSent = true;
    this.worker.postMessage(this.request());
  }

  /** @returns {import("./worker.js").BandRequest} */
  request() {
    return {
      task: "band",
      settings: this.state.settings,
      x: this.points.map(({ x }) => x),
      y: this.points.map(({ y }) => y),
      range: this.scene.xRange,
      running: this.isRunning && this.isVisible,
      restarts: this.restarts,
    };
  }

  /** A first band of a few draws, made in this thread: a worker takes longer to start than that. */
  preview() {
    const run = taskRunner((message) => this.band ?? this.showBand({ ...message, isTraining: true }));
    const { settings } = this.state;
    run({ ...this.request(), settings: { ...settings, nDraws: Math.min(FIRST_DRAWS, settings.nDraws), process: false }, running: false });
  }

  /** @param {boolean} isVisible */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.send();
    if (isVisible) this.redraw();
  }

  /** @param {State} state */
  setState(state) {
    this.state = state;
    this.process = null;
    this.showControls();
    this.update();
  }

  // Controls ----------------------------------------------------------------------------------------------------------

  buildScenes() {
    for (const [name, { title }] of Object.entries(SCENES)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = title;
      button.dataset.scene = name;
      button.addEventListener("click", () => {
        this.band = null;
        this.before = null;
        this.restarts += 1;
        const settings = /** @type {Settings} */ (sceneSettings(name));
        this.setState({ tab: "points", scene: name, points: null, settings });
      });
      byId("scenes").append(button);
    }
  }

  bindControls() {
    for (const [name, { isLog }] of Object.entries(SLIDERS)) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      const [least, greatest] = RANGES[name];
      Object.assign(input, isLog ? { min: "0", max: "100", step: "0.5" } : { min: String(least), max: String(greatest), step: "1" });
      input.addEventListener("input", () => {
        const position = Number(input.value);
        const exact = isLog ? least * (greatest / least) ** (position / 100) : position;
        this.change({ [name]: isLog ? Number(exact.toPrecision(3)) : exact });
      });
    }
    for (const name of TOGGLES) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.addEventListener("change", () => this.change({ [name]: input.checked }));
    }
    for (const name of CHOICES) {
      const select = /** @type {HTMLSelectElement} */ (byId(name));
      select.addEventListener("change", () => this.change({ [name]: select.value }));
    }
    for (const name of NUMBERS) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.addEventListener("input", () => {
        const value = settingOfText(name, input.value);
        if (value !== undefined) this.change({ [name]: value });
      });
      input.addEventListener("blur", () => this.showControls());
    }
    this.bindButtons();
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  bindButtons() {
    byId("erase").addEventListener("click", () => {
      this.editor.isErasing = !this.editor.isErasing;
      this.showControls();
    });
    byId("clear").addEventListener("click", () => {
      this.restarts += 1;
      this.setPoints([]);
    });
    byId("restart").addEventListener("click", () => {
      // Another seed: other weights to start from, other masks.
      this.change({ seed: (this.state.settings.seed + 1) % RANGES.seed[1] });
    });
    byId("run").addEventListener("click", () => {
      this.isRunning = !this.isRunning;
      this.showControls();
      this.send();
    });
    byId("why").addEventListener("click", () => /** @type {HTMLDialogElement} */ (byId("limits")).showModal());
    byId("copy-python").addEventListener("click", () => copyText(this.python(), "The program is in the clipboard: paste it into Python."));
    byId("copy-link").addEventListener("click", () => copyText(this.address(), "The link is in the clipboard."));
  }

  /** @param {Partial<Settings>} changes */
  change(changes) {
    this.state.settings = { ...this.state.settings, ...changes };
    if ("process" in changes || "covariance" in changes) this.process = null;
    this.showControls();
    this.update();
  }

  showControls() {
    const { settings } = this.state;
    for (const [name, { isLog, shown }] of Object.entries(SLIDERS)) {
      const value = /** @type {number} */ (settings[/** @type {keyof Settings} */ (name)]);
      const [least, greatest] = RANGES[name];
      const input = /** @type {HTMLInputElement} */ (byId(name));
      input.value = String(isLog ? (100 * Math.log(value / least)) / Math.log(greatest / least) : value);
      input.setAttribute("aria-valuetext", shown(value));
      byId(`${name}-value`).textContent = shown(value);
    }
    for (const name of TOGGLES) /** @type {HTMLInputElement} */ (byId(name)).checked = settings[name];
    for (const name of CHOICES) /** @type {HTMLSelectElement} */ (byId(name)).value = settings[name];
    for (const name of NUMBERS) {
      const input = /** @type {HTMLInputElement} */ (byId(name));
      if (document.activeElement !== input) input.value = String(settings[name]);
    }
    /** @type {HTMLInputElement} */ (byId("precision")).disabled = settings.learnPrecision;
    byId("erase").setAttribute("aria-pressed", String(this.editor.isErasing));
    byId("plot").classList.toggle("erasing", this.editor.isErasing);
    byId("run").textContent = this.isRunning ? "Pause" : "Train";
    byId("run").setAttribute("aria-pressed", String(!this.isRunning));
    byId("ratio").hidden = !settings.process;
    byId("note").textContent = this.scene.note;
    this.showScene();
  }

  /** Marks the scene's button and, where the buttons do not fit, moves it into sight. */
  showScene() {
    const list = byId("scenes");
    for (const child of list.children) {
      const button = /** @type {HTMLElement} */ (child);
      const isCurrent = button.dataset.scene === this.state.scene;
      if (isCurrent && button.getAttribute("aria-current") !== "true") list.scrollLeft = button.offsetLeft - (list.clientWidth - button.offsetWidth) / 2;
      button.setAttribute("aria-current", String(isCurrent));
    }
  }

  /** The program that makes what is on the screen. */
  python() {
    if (!this.band) return "";
    const { network, precision, grid, settings } = this.band;
    return pythonCode({ ...settings, network, points: this.points, precision, grid, draw: Math.min(this.state.settings.draw, settings.nDraws - 1) });
  }

  address() {
    const usual = /** @type {Settings} */ (sceneSettings(this.state.scene));
    return `${location.href.split("#")[0]}#${stateFragment(this.state, usual)}`;
  }

  // What the worker says ----------------------------------------------------------------------------------------------

  /** @param {Band} band */
  showBand(band) {
    const now = performance.now();
    if (this.calm.matches && band.isTraining && now - this.bandTime < CALM_FRAME) return;
    const isSame = this.band && this.band.draws.length === band.draws.length && this.band.grid[0] === band.grid[0];
    this.before = isSame && !this.calm.matches ? this.shownBand(now) : null;
    if (this.band?.isTraining && !band.isTraining && this.isRunning) speak(`The network has settled after ${band.step} steps.`);
    this.band = band;
    this.bandTime = now;
    this.describe(band);
    this.redraw();
  }

  /** @param {Band} band */
  describe(band) {
    const n = this.points.length;
    const count = n === 1 ? "1 point" : `${n} points`;
    const doing = n === 0 ? "click to add points" : band.isTraining ? `step ${band.step}` : this.isRunning ? `settled after ${band.step} steps` : "paused";
    byId("status").textContent = n === 0 ? doing : `${count} · ${doing}`;
    const [first, second] = band.decays;
    byId("noise").textContent = `noise deviation 1/√τ = ${shortNumber(band.precision ** -0.5)}`;
    byId("decays").textContent = `first layer ${shortNumber(first)}, then ${shortNumber(second)}`;
    if (this.state.settings.learnPrecision) byId("precision-value").textContent = SLIDERS.precision.shown(band.precision);
  }

  /** @param {Process} process */
  showProcess(process) {
    this.process = process;
    this.redraw();
  }

  // Drawing -----------------------------------------------------------------------------------------------------------

  redraw() {
    if (!this.frame && this.isVisible) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  /**
   * The band between the last one and the new one.
   * @param {number} now
   * @returns {Band | null}
   */
  shownBand(now) {
    const share = Math.min(1, (now - this.bandTime) / TWEEN);
    const { band, before } = this;
    if (!band || !before || share >= 1) return band;
    const mixed = (/** @type {"mean" | "epistemic" | "standard" | "draws"} */ name) => {
      const [from, to] = [before[name], band[name]];
      const result = new Float64Array(to.length);
      for (let k = 0; k < to.length; k += 1) result[k] = from[k] + share * (to[k] - from[k]);
      return result;
    };
    const { draws, oneDraw } = this.state.settings;
    return { ...band, mean: mixed("mean"), epistemic: mixed("epistemic"), standard: mixed("standard"), draws: draws || oneDraw ? mixed("draws") : band.draws };
  }

  /** @param {number} now */
  draw(now) {
    this.frame = 0;
    const { scene, points, process, editor } = this;
    this.picture.draw({ scene, points, process, settings: this.state.settings, band: this.shownBand(now), cursor: editor.cursor, grasped: editor.grasped });
    if (this.before && now - this.bandTime < TWEEN) this.redraw();
  }

  scales() {
    return this.picture.scales(this.scene);
  }
}

/** The view of the digit: written or drawn, turned, read by the draws of a network. */
import { byId } from "./document.js";
import { centredStrokes, DIGITS, drawLogits, DROP_PROB, hiddenUnits, ink, N_CLASSES, readTensors, restoredLayers, rotatedImage, SIDE, softmax, uncertainty } from "./digit.js";
import { sharedMasks } from "./masks.js";
import { linearScale, plainNumber, shortNumber, Surface } from "./plot.js";

/** @typedef {import("./digit.js").Stroke} Stroke */
/** @typedef {{logits: Float64Array, probabilities: Float64Array, mean: Float64Array, entropy: number, mutualInformation: number}} Reading */

const KEYS = /** @type {const} */ ({ seed: 3, nDraws: 100, sampler: "stratified", replicate: 0 });
const N_ANGLES = 25;
const N_SHOWN = 3; // classes in the scatter: those most often on top
const TURN_SPEED = 45; // degrees per second

/** The tab of the digit. */
export class DigitView {
  /** @param {Uint8Array} weights the file of the network */
  constructor(weights) {
    this.network = restoredLayers(readTensors(weights));
    this.masks = sharedMasks(KEYS, 0, this.network.hidden.bias.length, DROP_PROB);
    this.pad = new Surface(byId("digit-pad"));
    this.classes = new Surface(byId("classes"));
    this.scatters = [new Surface(byId("scatter-input")), new Surface(byId("scatter-output"))];
    this.angles = Array.from({ length: N_ANGLES }, (_, k) => -180 + (360 * k) / (N_ANGLES - 1));
    /** @type {Stroke[]} */
    this.strokes = DIGITS[1];
    this.kind = 1;
    this.angle = 0;
    this.isVisible = true;
    this.isTurning = false;
    this.frame = 0;
    this.lastFrame = 0;
    /** @type {Stroke | null} */
    this.pen = null;
    /** @type {Reading[]} what is read at every angle of the scatter */
    this.readings = [];
    /** @type {Reading | null} */
    this.reading = null;
    this.image = ink([]);
    this.bind();
    this.setStrokes(DIGITS[1], 1);
  }

  bind() {
    for (let kind = 0; kind < N_CLASSES; kind += 1) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = String(kind);
      button.addEventListener("click", () => this.setStrokes(DIGITS[kind], kind));
      byId("samples").append(button);
    }
    const slider = /** @type {HTMLInputElement} */ (byId("angle"));
    slider.addEventListener("input", () => this.setAngle(Number(slider.value)));
    byId("digit-clear").addEventListener("click", () => this.setStrokes([], -1));
    byId("digit-turn").addEventListener("click", () => {
      this.isTurning = !this.isTurning;
      byId("digit-turn").setAttribute("aria-pressed", String(this.isTurning));
      this.lastFrame = performance.now();
      this.redraw();
    });
    this.bindPad();
    const observer = new ResizeObserver(() => this.redraw());
    for (const surface of [this.pad, this.classes, ...this.scatters]) observer.observe(surface.canvas);
  }

  bindPad() {
    const { canvas } = this.pad;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.focus({ preventScroll: true });
      if (this.kind >= 0 || this.angle !== 0) this.setStrokes([], -1); // a written digit makes room for a drawn one
      this.pen = [this.place(event)];
      this.strokes = [...this.strokes, this.pen];
      this.redraw();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.pen) return;
      this.pen.push(this.place(event));
      this.redraw();
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      canvas.addEventListener(name, () => {
        if (!this.pen) return;
        this.pen = null;
        this.setStrokes(this.strokes, -1);
      });
    }
    canvas.addEventListener("keydown", (event) => {
      const turn = event.shiftKey ? 15 : 3;
      if (/^[0-9]$/.test(event.key)) this.setStrokes(DIGITS[Number(event.key)], Number(event.key));
      else if (event.key === "ArrowLeft") this.setAngle(this.angle + turn);
      else if (event.key === "ArrowRight") this.setAngle(this.angle - turn);
      else if (event.key === "Delete" || event.key === "Backspace") this.setStrokes([], -1);
      else return;
      event.preventDefault();
    });
  }

  /** @param {PointerEvent} event */
  place(event) {
    const box = this.pad.canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
  }

  /**
   * Takes new strokes, upright, and reads them at every angle.
   * @param {Stroke[]} strokes @param {number} kind of a written digit; -1 for a drawn one
   */
  setStrokes(strokes, kind) {
    this.strokes = strokes;
    this.kind = kind;
    this.image = ink(centredStrokes(strokes));
    this.readings = strokes.length === 0 ? [] : this.angles.map((angle) => this.read(angle));
    [...byId("samples").children].forEach((button, k) => button.setAttribute("aria-pressed", String(k === kind)));
    this.setAngle(kind < 0 ? 0 : this.angle);
  }

  /** @param {number} angle */
  setAngle(angle) {
    // Both ends of the slider are half a turn, and each stays where it is.
    this.angle = Math.abs(angle) <= 180 ? angle : ((((angle + 180) % 360) + 360) % 360) - 180;
    /** @type {HTMLInputElement} */ (byId("angle")).value = String(this.angle);
    byId("angle-value").textContent = `${plainNumber(Math.round(this.angle))}°`;
    this.reading = this.strokes.length === 0 ? null : this.read(this.angle);
    this.redraw();
  }

  /**
   * @param {number} angle
   * @returns {Reading}
   */
  read(angle) {
    const logits = drawLogits(this.network, hiddenUnits(this.network, rotatedImage(this.image, angle)), this.masks);
    const probabilities = softmax(logits);
    return { logits, probabilities, ...uncertainty(probabilities) };
  }

  /** @param {boolean} isVisible */
  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.redraw();
  }

  redraw() {
    if (!this.frame && this.isVisible) this.frame = requestAnimationFrame((now) => this.draw(now));
  }

  /** @param {number} now */
  draw(now) {
    this.frame = 0;
    if (this.isTurning && this.reading) {
      this.setAngle(this.angle + (TURN_SPEED * Math.min(now - this.lastFrame, 100)) / 1000);
      this.lastFrame = now;
    }
    this.drawPad();
    this.drawVerdict();
    const classes = this.mostFrequent();
    this.drawScatter(this.scatters[0], "logits", classes);
    this.drawScatter(this.scatters[1], "probabilities", classes);
    byId("scatter-legend").replaceChildren(...classes.map((kind, k) => swatch(`class ${kind}`, k)));
  }

  /** The image as the network sees it; while the pen is down, the strokes as they are drawn. */
  drawPad() {
    const context = this.pad.begin();
    const size = this.pad.width / SIDE;
    const image = this.pen ? ink(this.strokes) : rotatedImage(this.image, this.angle);
    context.fillStyle = this.pad.colour("ink");
    image.forEach((value, k) => {
      if (value < 0.02) return;
      context.globalAlpha = value;
      context.fillRect((k % SIDE) * size, Math.floor(k / SIDE) * size, size + 0.5, size + 0.5);
    });
    context.globalAlpha = 1;
    if (this.strokes.length > 0) return;
    context.fillStyle = this.pad.colour("faint");
    context.textAlign = "center";
    context.fillText("write a digit here", this.pad.width / 2, this.pad.height / 2);
  }

  drawVerdict() {
    const { reading, classes } = this;
    const context = classes.begin();
    byId("digit-read").textContent = reading ? String(reading.mean.indexOf(Math.max(...reading.mean))) : "";
    byId("digit-sure").textContent = reading ? `with probability ${shortNumber(Math.max(...reading.mean))}` : "nothing to read yet";
    byId("entropy").textContent = reading ? `${reading.entropy.toFixed(2)} nats` : "";
    byId("mutual").textContent = reading ? `${reading.mutualInformation.toFixed(2)} nats` : "";
    const x = linearScale([0, 1], 22, classes.width - 8);
    const row = (classes.height - 20) / N_CLASSES;
    context.textBaseline = "middle";
    for (let kind = 0; kind < N_CLASSES; kind += 1) {
      const middle = (kind + 0.5) * row;
      context.fillStyle = classes.colour("ink");
      context.textAlign = "left";
      context.fillText(String(kind), 4, middle);
      context.fillStyle = classes.colour("grid");
      context.fillRect(x(0), middle - row / 3, x(1) - x(0), (2 * row) / 3);
      if (!reading) continue;
      context.fillStyle = classes.colour("total");
      context.fillRect(x(0), middle - row / 3, x(reading.mean[kind]) - x(0), (2 * row) / 3);
      context.fillStyle = classes.colour("mean");
      context.globalAlpha = 0.35;
      for (let draw = 0; draw < KEYS.nDraws; draw += 1) {
        const value = reading.probabilities[draw * N_CLASSES + kind];
        if (value > 0.01) context.fillRect(x(value) - 1, middle - row / 3 + (draw % 7) * (row / 12), 2.5, 2.5);
      }
      context.globalAlpha = 1;
    }
    context.fillStyle = classes.colour("faint");
    context.textBaseline = "top";
    for (const [value, align] of /** @type {const} */ ([[0, "left"], [1, "right"]])) {
      context.textAlign = align;
      context.fillText(String(value), x(value), classes.height - 16);
    }
    context.textAlign = "center";
    const words = `probability: mean and ${KEYS.nDraws} draws`;
    const fits = context.measureText(words).width < x(1) - x(0) - 24; // between the two numbers
    context.fillText(fits ? words : "probability", x(0.5), classes.height - 16);
  }

  /** The classes that most draws at most angles put on top; none before anything is read. */
  mostFrequent() {
    if (this.readings.length === 0) return [];
    const counts = new Array(N_CLASSES).fill(0);
    for (const { mean } of this.readings) mean.forEach((p, kind) => (counts[kind] += p));
    return [...counts.keys()].sort((a, b) => counts[b] - counts[a]).slice(0, N_SHOWN);
  }

  /** @param {Surface} surface @param {"logits" | "probabilities"} name @param {number[]} classes */
  drawScatter(surface, name, classes) {
    const context = surface.begin();
    const { readings } = this;
    const isLogit = name === "logits";
    const values = isLogit ? readings.flatMap((reading) => classes.flatMap((kind) => extremes(reading.logits, kind))) : [0, 1];
    const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
    const pad = 0.06 * (high - low);
    const x = linearScale([-188, 188], 44, surface.width - 8);
    const y = linearScale([low - pad, high + pad], surface.height - 24, 6);
    const narrow = surface.width < 420;
    const at = { x: narrow ? [-180, -90, 0, 90, 180] : [-180, -120, -60, 0, 60, 120, 180], y: isLogit ? [0, 10, 20, 30, -10, -20].filter((v) => v > low - pad && v < high + pad) : [0, 0.5, 1] };
    surface.axes(x, y, { x: (v) => `${plainNumber(v)}°`, y: plainNumber }, at);
    context.strokeStyle = surface.colour("focus");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x(this.angle), y(low - pad));
    context.lineTo(x(this.angle), y(high + pad));
    context.stroke();
    context.globalAlpha = 0.4;
    classes.forEach((kind, k) => {
      context.fillStyle = surface.colour(`c${k}`);
      readings.forEach((reading, place) => {
        for (let draw = 0; draw < KEYS.nDraws; draw += 1) {
          const shift = ((draw * 0.618) % 1) * 7 - 3.5; // spread sideways, so that points do not hide each other
          context.fillRect(x(this.angles[place] + shift) - 1, y(reading[name][draw * N_CLASSES + kind]) - 1, 2.2, 2.2);
        }
      });
    });
    context.globalAlpha = 1;
  }
}

/**
 * The least and the greatest softmax input of a class.
 * @param {Float64Array} logits @param {number} kind
 */
function extremes(logits, kind) {
  const values = logits.filter((_, k) => k % N_CLASSES === kind);
  return [Math.min(...values), Math.max(...values)];
}

/** @param {string} text @param {number} k */
function swatch(text, k) {
  const label = document.createElement("span");
  label.className = `swatch c${k}`;
  label.append(document.createElement("i"), text);
  return label;
}

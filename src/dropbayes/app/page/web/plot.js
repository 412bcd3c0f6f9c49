/** Drawing on a canvas: scales, axes, lines and bands, in the colours of the style sheet. */

/** @typedef {[number, number]} Range */

/**
 * A linear map from data to pixels.
 * @typedef {{(value: number): number, inverse: (pixel: number) => number, range: Range}} Scale
 */

/**
 * @param {Range} range @param {number} from pixel of its start @param {number} to pixel of its end
 * @returns {Scale}
 */
export function linearScale(range, from, to) {
  const factor = (to - from) / (range[1] - range[0]);
  const scale = (/** @type {number} */ value) => from + (value - range[0]) * factor;
  return Object.assign(scale, { inverse: (/** @type {number} */ pixel) => range[0] + (pixel - from) / factor, range });
}

/**
 * Round numbers inside a range, about `count` of them.
 * @param {Range} range @param {number} count
 */
export function ticks([from, to], count) {
  const raw = (to - from) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= raw) ?? 10);
  const values = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9 * step; k += 1) values.push(Number((k * step).toPrecision(12)));
  return values;
}

/** A canvas that is as sharp as the screen. */
export class Surface {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.width = 0;
    this.height = 0;
    this.scheme = "";
    /** @type {Map<string, string>} */
    this.colours = new Map();
  }

  /** Fits the canvas to its place, clears it, and looks the colours up again. */
  begin() {
    const box = this.canvas.getBoundingClientRect();
    const ratio = Math.min(window.devicePixelRatio || 1, 3);
    const [width, height] = [Math.max(1, Math.round(box.width * ratio)), Math.max(1, Math.round(box.height * ratio))];
    if (this.canvas.width !== width || this.canvas.height !== height) {
      this.canvas.width = width;
      this.canvas.height = height;
    }
    this.width = box.width;
    this.height = box.height;
    const { colorScheme, fontSize } = getComputedStyle(document.documentElement);
    if (colorScheme !== this.scheme) this.colours.clear();
    this.scheme = colorScheme;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, box.width, box.height);
    this.context.lineJoin = "round";
    this.context.font = `${0.75 * parseFloat(fontSize)}px system-ui, sans-serif`;
    return this.context;
  }

  /**
   * A colour of the style sheet.
   * @param {string} name
   */
  colour(name) {
    let value = this.colours.get(name);
    if (value === undefined) {
      value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
      this.colours.set(name, value);
    }
    return value;
  }

  /**
   * Axes with a faint grid and numbers.
   * @param {Scale} x @param {Scale} y
   * @param {{x: (value: number) => string, y: (value: number) => string}} [format]
   * @param {{x: number[], y: number[]}} [places]
   */
  axes(x, y, format, places) {
    const { context } = this;
    const [left, right] = [x(x.range[0]), x(x.range[1])];
    const [bottom, top] = [y(y.range[0]), y(y.range[1])];
    const atX = places?.x ?? ticks(x.range, (right - left) / 70);
    const atY = places?.y ?? ticks(y.range, (bottom - top) / 50);
    context.strokeStyle = this.colour("grid");
    context.lineWidth = 1;
    context.beginPath();
    for (const value of atX) line(context, Math.round(x(value)) + 0.5, top, Math.round(x(value)) + 0.5, bottom);
    for (const value of atY) line(context, left, Math.round(y(value)) + 0.5, right, Math.round(y(value)) + 0.5);
    context.stroke();
    context.fillStyle = this.colour("faint");
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const value of atX) {
      const text = format?.x(value) ?? plainNumber(value);
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(x(value), this.width - half - 2), bottom + 6);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of atY) context.fillText(format?.y(value) ?? plainNumber(value), left - 6, y(value));
  }

  /**
   * What the axes show, in the corners, on top of everything.
   * @param {Scale} x @param {Scale} y @param {{x: string, y: string}} labels
   * @param {number} [top] pixels from the upper edge to the label of y
   */
  axisLabels(x, y, labels, top = 4) {
    const { context } = this;
    context.fillStyle = this.colour("faint");
    context.strokeStyle = this.colour("paper");
    context.lineWidth = 3;
    const write = (/** @type {string} */ text, /** @type {number} */ atX, /** @type {number} */ atY) => {
      context.strokeText(text, atX, atY);
      context.fillText(text, atX, atY);
    };
    context.textAlign = "right";
    context.textBaseline = "bottom";
    write(labels.x, x(x.range[1]) - 4, y(y.range[0]) - 4);
    context.textAlign = "left";
    context.textBaseline = "top";
    write(labels.y, x(x.range[0]) + 6, y(y.range[1]) + top);
  }

  /**
   * A line through (x, y).
   * @param {Scale} x @param {Scale} y @param {ArrayLike<number>} xs @param {ArrayLike<number>} ys
   * @param {{colour: string, width?: number, dash?: number[], alpha?: number}} look
   */
  curve(x, y, xs, ys, { colour, width = 2, dash = [], alpha = 1 }) {
    const { context } = this;
    context.beginPath();
    trace(context, x, y, xs, ys, 0);
    context.strokeStyle = this.colour(colour);
    context.globalAlpha = alpha;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  /**
   * The area between two lines.
   * @param {Scale} x @param {Scale} y @param {ArrayLike<number>} xs @param {ArrayLike<number>} lower
   * @param {ArrayLike<number>} upper @param {{colour: string, alpha: number}} look
   */
  band(x, y, xs, lower, upper, { colour, alpha }) {
    const { context } = this;
    context.beginPath();
    for (let k = 0; k < xs.length; k += 1) context.lineTo(x(xs[k]), y(upper[k]));
    for (let k = xs.length - 1; k >= 0; k -= 1) context.lineTo(x(xs[k]), y(lower[k]));
    context.closePath();
    context.fillStyle = this.colour(colour);
    context.globalAlpha = alpha;
    context.fill();
    context.globalAlpha = 1;
  }

  /**
   * Many lines over the same places, `[line, place]`, a few to a stroke: fast, and dense where they agree.
   * @param {Scale} x @param {Scale} y @param {ArrayLike<number>} xs @param {Float64Array} values
   * @param {{colour: string, alpha: number}} look
   */
  curves(x, y, xs, values, { colour, alpha }) {
    const { context } = this;
    const count = values.length / xs.length;
    context.strokeStyle = this.colour(colour);
    context.globalAlpha = alpha;
    context.lineWidth = 1;
    const together = 10;
    for (let from = 0; from < count; from += together) {
      context.beginPath();
      for (let k = from; k < Math.min(from + together, count); k += 1) trace(context, x, y, xs, values, k * xs.length);
      context.stroke();
    }
    context.globalAlpha = 1;
  }

  /**
   * Keeps what follows inside the axes, until the function returns.
   * @param {Scale} x @param {Scale} y @param {() => void} drawing
   */
  inside(x, y, drawing) {
    const { context } = this;
    const [left, top] = [x(x.range[0]), y(y.range[1])];
    context.save();
    context.beginPath();
    context.rect(left, top, x(x.range[1]) - left, y(y.range[0]) - top);
    context.clip();
    drawing();
    context.restore();
  }
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} toX @param {number} toY */
function line(context, x, y, toX, toY) {
  context.moveTo(x, y);
  context.lineTo(toX, toY);
}

/**
 * @param {CanvasRenderingContext2D} context @param {Scale} x @param {Scale} y
 * @param {ArrayLike<number>} xs @param {ArrayLike<number>} ys @param {number} from
 */
function trace(context, x, y, xs, ys, from) {
  context.moveTo(x(xs[0]), y(ys[from]));
  for (let k = 1; k < xs.length; k += 1) context.lineTo(x(xs[k]), y(ys[from + k]));
}

/** A number as it is written, with a true minus sign. @param {number} value */
export function plainNumber(value) {
  return String(value).replace("-", "\u2212");
}

/** A number to three digits, large or small. @param {number} value */
export function shortNumber(value) {
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) {
    const [digits, power] = value.toExponential(1).split("e");
    const superscript = [...String(Number(power))].map((sign) => "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"["0123456789-".indexOf(sign)]).join("");
    return plainNumber(Number(digits)) + (superscript === "⁰" ? "" : ` · 10${superscript}`);
  }
  return plainNumber(Number(value.toPrecision(3)));
}

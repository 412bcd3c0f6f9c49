/** The page: its tabs, its address, and the same program started again as a worker. */
import { DigitView } from "./digit_view.js";
import { byId } from "./document.js";
import { PointsView, sceneSettings } from "./points_view.js";
import { SCENES } from "./scenes.js";
import { stateOfFragment, stateFragment, TABS } from "./state.js";
import { taskRunner } from "./worker.js";
import { WorldView } from "./world_view.js";

/** @typedef {import("./state.js").Settings} Settings */

const ADDRESS_DELAY = 300; // milliseconds after the last change

/** A worker that runs this very program, whose text the document holds. */
function startWorker() {
  const program = byId("program").textContent ?? "";
  const address = URL.createObjectURL(new Blob([program], { type: "text/javascript" }));
  const worker = new Worker(address);
  URL.revokeObjectURL(address);
  return worker;
}

/** The file of the digit's network, which the document holds as text. */
function digitWeights() {
  const text = atob((byId("weights").textContent ?? "").trim());
  return Uint8Array.from(text, (sign) => sign.charCodeAt(0));
}

function readAddress() {
  return stateOfFragment(location.hash.slice(1), sceneSettings, Object.keys(SCENES)[0]);
}

function startPage() {
  let state = readAddress();
  let timer = 0;
  const writeAddress = () => {
    const usual = /** @type {Settings} */ (sceneSettings(state.scene));
    history.replaceState(null, "", `#${stateFragment(state, usual)}`);
  };
  const changed = () => {
    state = points.state;
    clearTimeout(timer);
    timer = window.setTimeout(writeAddress, ADDRESS_DELAY);
  };
  const points = new PointsView(state, startWorker, changed);
  /** The views that are made when their tab is first opened. @type {Record<string, {setVisible: (isVisible: boolean) => void, redraw: () => void}>} */
  const views = { points };
  const open = (/** @type {string} */ name) => {
    state.tab = name;
    for (const tab of TABS) {
      const isOpen = tab === name;
      byId(tab).hidden = !isOpen;
      byId(`tab-${tab}`).setAttribute("aria-selected", String(isOpen));
      byId(`tab-${tab}`).tabIndex = isOpen ? 0 : -1;
      if (!isOpen) views[tab]?.setVisible(false);
    }
    views.world ??= name === "world" ? new WorldView(startWorker) : views.world;
    views.digit ??= name === "digit" ? new DigitView(digitWeights()) : views.digit;
    views[name].setVisible(true);
    changed();
  };
  for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => open(tab));
  bindTabKeys(open);
  const redrawAll = () => Object.values(views).forEach((view) => view?.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  bindPrinting(() => points.draw(performance.now()));
  addEventListener("hashchange", () => {
    const next = readAddress();
    points.setState(next);
    open(next.tab);
  });
  // A page in the background works for nobody.
  document.addEventListener("visibilitychange", () => views[state.tab].setVisible(!document.hidden));
  open(state.tab);
  if (state.tab === "points") points.preview();
}

/**
 * Arrow keys go from tab to tab, as in any list of tabs.
 * @param {(name: string) => void} open
 */
function bindTabKeys(open) {
  TABS.forEach((tab, k) => {
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) return;
      const next = TABS[(k + step + TABS.length) % TABS.length];
      open(next);
      byId(`tab-${next}`).focus();
      event.preventDefault();
    });
  });
}

/**
 * Paper is light, whatever the screen is.
 * @param {() => void} draw
 */
function bindPrinting(draw) {
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.printing = "";
    draw();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.printing;
    draw();
  });
}

if (typeof document === "undefined") {
  const run = taskRunner((message) => postMessage(message));
  addEventListener("message", ({ data }) => run(data));
} else {
  startPage();
}
